"""The real command line: one command trains, stops, resumes, and refuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_ROOT = Path(__file__).parents[2]
_SMALL = ["--training.seq_len=64", "--metrics.log_freq=1", "--debug.deterministic", "--lr_scheduler.warmup_steps=0"]
_CP = ["--parallelism.context_parallel_degree=2"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the token cache of this module's runs."""
    return tmp_path_factory.mktemp("cache")


def _environment(cache: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("LOG_RANK", "CONFIG_FILE", "TRAIN_FILE")}
    return {**kept, "PYTHON": sys.executable, "NGPU": "2", "TORCHTITAN_CACHE": str(cache), **changes}


def _train(folder: Path, cache: Path, *options: str, **changes: str) -> "subprocess.CompletedProcess[str]":
    command = [str(_ROOT / "run_train.sh"), *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=_environment(cache, **changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _exact(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss_hex", "grad_norm_hex", "lr", "tokens_seen")
    return [tuple(row[key] for key in keys) for row in _rows(folder)]


def _checkpoint_tensors(step_folder: Path) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(step_folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=step_folder, no_dist=True)
    return state


def test_one_command_trains_and_its_configuration_runs_again(tmp_path: Path, cache: Path) -> None:
    """Relative paths are relative to the caller's folder; config.toml gives the same bits."""
    result = _train(tmp_path, cache, *_SMALL, *_CP, "--training.steps=3", "--job.dump_folder=first")
    assert result.returncode == 0, result.stderr
    rows = _rows(tmp_path / "first")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["tokens_seen"] == 3 * 64
    assert "2 = dp_shard 1 x cp 2" in result.stderr and "step:  3  loss: " in result.stderr
    assert "llama3 debugmodel" in result.stderr
    again = _train(tmp_path, cache, "--job.dump_folder=second", CONFIG_FILE="first/config.toml")
    assert again.returncode == 0, again.stderr
    assert _exact(tmp_path / "second") == _exact(tmp_path / "first")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path, cache: Path) -> None:
    """SIGTERM in the middle, then the same command once more; and the whole run in one go beside it."""
    options = [*_SMALL, *_CP, "--training.steps=20", "--checkpoint.enable"]
    whole = _train(tmp_path, cache, *options, "--job.dump_folder=whole")
    assert whole.returncode == 0, whole.stderr
    command = [str(_ROOT / "run_train.sh"), *options, "--job.dump_folder=stopped"]
    with subprocess.Popen(command, cwd=tmp_path, env=_environment(cache), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step:  3 " in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    stopped_at = _rows(tmp_path / "stopped")[-1]["step"]
    assert 3 <= stopped_at < 20
    assert (tmp_path / f"stopped/checkpoint/step-{stopped_at}").is_dir()
    resumed = _train(tmp_path, cache, *options, "--job.dump_folder=stopped")
    assert resumed.returncode == 0, resumed.stderr
    assert _exact(tmp_path / "stopped") == _exact(tmp_path / "whole")
    one, other = (_checkpoint_tensors(tmp_path / name / "checkpoint/step-20") for name in ("whole", "stopped"))
    assert one.keys() == other.keys() and len(one) > 100
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    result = _train(tmp_path, cache, "--training.seq_len=62", *_CP)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("--training.seq_len=62: 62 is not a multiple of 4; ")
    assert not list(tmp_path.iterdir())


_OWN_TRAINER = """
import sys
from torchtitan.train import main
from torchtitan.trainer import Trainer


class MyTrainer(Trainer):
    def post_dataloading_process(self, microbatch):
        batch = super().post_dataloading_process(microbatch)
        print(f"this rank's positions: {batch.positions[0, :4].tolist()} of {len(batch.positions[0])}")
        return batch


if __name__ == "__main__":
    sys.exit(main(trainer_class=MyTrainer))
"""


def test_a_trainer_of_the_users_own_starts_by_train_file(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "my_train.py").write_text(_OWN_TRAINER)
    options = [*_SMALL, *_CP, "--training.steps=1"]
    result = _train(tmp_path, cache, *options, TRAIN_FILE="my_train.py", LOG_RANK="0,1")
    assert result.returncode == 0, result.stderr
    for first in ("[0, 1, 2, 3]", "[16, 17, 18, 19]"):  # ranks share stdout, so lines may run into each other
        assert result.stdout.count(f"this rank's positions: {first} of 32") == 1


def test_the_configuration_is_printed_once(tmp_path: Path, cache: Path) -> None:
    result = _train(tmp_path, cache, "--job.print_config", "--training.steps=7")
    assert result.returncode == 0
    assert result.stdout.count("[training]") == 1 and "steps = 7" in result.stdout
    assert not list(tmp_path.iterdir())
