"""What the launcher makes of the variables that run_train.sh documents."""

import os
from pathlib import Path

import pytest

from torchtitan.errors import ConfigError
from torchtitan.tools.launch import agent_arguments, children, num_processes, worker_environment


def test_one_node_finds_its_own_port() -> None:
    arguments = agent_arguments({"NGPU": "4"}, ["--training.steps=1"])
    assert arguments[:3] == ["--nproc_per_node=4", "--standalone", "--max_restarts=0"]
    assert arguments[3:5] == ["-m", "torchtitan.train"]
    assert arguments[5].startswith("--job.config_file=") and arguments[5].endswith(
        "llama3/train_configs/debug_model.toml"
    )
    assert Path(arguments[5].split("=")[1]).is_file()
    assert arguments[6:] == ["--training.steps=1"]


def test_several_nodes_take_torchruns_settings(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    environment = {
        "NGPU": "8",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "1234",
        "RDZV_ID": "job7",
        "MAX_RESTARTS": "3",
        "CONFIG_FILE": "my.toml",
        "TRAIN_FILE": str(program),
    }
    assert agent_arguments(environment, []) == [
        "--nproc_per_node=8",
        "--nnodes=2",
        "--rdzv_endpoint=host0:1234",
        "--rdzv_backend=c10d",
        "--rdzv_id=job7",
        "--node_rank=1",
        "--max_restarts=3",
        str(program),
        "--job.config_file=my.toml",
    ]


@pytest.mark.parametrize("given", ["--job.config_file=a.toml", "--job.config-file=a.toml"])
def test_a_config_file_on_the_command_line_is_the_only_one(given: str) -> None:
    assert agent_arguments({"NGPU": "1", "CONFIG_FILE": "b.toml"}, [given])[-1] == given
    assert not any("b.toml" in word for word in agent_arguments({"NGPU": "1", "CONFIG_FILE": "b.toml"}, [given]))


def test_processes_are_the_gpus_or_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert num_processes({"NGPU": "3"}) == 3
    assert num_processes({"CUDA_VISIBLE_DEVICES": "4,5,6"}) == 3
    assert num_processes({"CUDA_VISIBLE_DEVICES": ""}) == 2
    assert num_processes({}) == 2
    listing = tmp_path / "nvidia-smi"
    listing.write_text('#!/bin/sh\necho "GPU 0: A"\necho "GPU 1: A"\necho "GPU 2: A"\n')
    listing.chmod(0o755)
    assert num_processes({}) == 3


def test_cores_are_shared_out_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert worker_environment({"NGPU": "2"})["OMP_NUM_THREADS"] == "4"
    assert worker_environment({"NGPU": "16"})["OMP_NUM_THREADS"] == "1"
    assert worker_environment({"NGPU": "2", "OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_the_started_tree_comes_first_and_the_users_program_is_found() -> None:
    environment = worker_environment({"NGPU": "1", "PYTHONPATH": "/theirs", "TRAIN_FILE": "/mine/train.py"})
    root = str(Path(__file__).parents[3])
    assert environment["PYTHONPATH"].split(os.pathsep) == [root, "/theirs", "/mine"]
    assert environment["PYTHONSAFEPATH"] == "1"


def test_children_are_found() -> None:
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in children(os.getpid())
        assert os.getpid() not in children(process.pid)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("NGPU", "0", "NGPU=0: not a number of processes"),
        ("NGPU", "all", "NGPU=all: not a number"),
        ("NNODES", "two", "NNODES=two: not a number"),
        ("TRAIN_FILE", "nowhere.py", "TRAIN_FILE=nowhere.py: there is no such file"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        agent_arguments({"NGPU": "1", name: value}, [])
