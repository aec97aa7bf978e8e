"""What a file and a command line become. A loader that lets a wrong name pass trains something else than was asked."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config.job import OPTIONS, SECTIONS, JobConfig, value_of
from torchtitan.config.parse import load_config, to_toml
from torchtitan.errors import ConfigError


def write(folder: Path, text: str) -> str:
    """Return the path of a file of that text."""
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(*argv: str) -> str:
    """Return the message that the command line is refused with."""
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value)


def test_defaults_without_arguments() -> None:
    assert load_config([])[0] == JobConfig()


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nlr = 1\n")
    config, _ = load_config([f"--job.config_file={path}", "--training.steps=7"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (7, 64, 8)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.job.config_file == path


@pytest.mark.parametrize("name", ["--job.config_file", "--job.config-file"])
def test_config_file_is_given_with_equals_or_space(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "[training]\nsteps = 5\n")
    assert load_config([name, path])[0].training.steps == 5
    assert load_config([f"{name}={path}"])[0].training.steps == 5


@pytest.mark.parametrize(
    ("argv", "option", "value"),
    [
        (["--training.steps", "10"], "training.steps", 10),
        (["--training.steps=10"], "training.steps", 10),
        (["--training.steps=10", "--training.steps=11"], "training.steps", 11),
        (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
        (["--lr-scheduler.decay-ratio=0.5"], "lr_scheduler.decay_ratio", 0.5),
        (["--lr_scheduler.decay_ratio=None"], "lr_scheduler.decay_ratio", None),
        (["--debug.deterministic"], "debug.deterministic", True),
        (["--debug.deterministic=True"], "debug.deterministic", True),
        (["--debug.deterministic=true"], "debug.deterministic", True),
        (["--debug.deterministic", "true"], "debug.deterministic", True),
        (["--debug.deterministic", "--debug.deterministic=False"], "debug.deterministic", False),
        (["--debug.deterministic", "--debug.no_deterministic"], "debug.deterministic", False),
        (["--debug.deterministic", "--debug.no-deterministic"], "debug.deterministic", False),
        (["--checkpoint.enable", "--training.steps=3"], "checkpoint.enable", True),
        (["--job.description=--a b=c"], "job.description", "--a b=c"),
        (["--job.description="], "job.description", ""),
        (
            ["--parallelism.context_parallel_load_balancer", "none"],
            "parallelism.context_parallel_load_balancer",
            "none",
        ),
    ],
)
def test_spellings(argv: list[str], option: str, value: object) -> None:
    assert value_of(load_config(argv)[0], option) == value


def test_sections_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([])[0].training.steps = 1  # type: ignore[misc]


def test_all_wrong_names_and_values_are_in_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nseqlen = 3\nsteps = '5'\n[optimzer]\nlr = 3\n")
    message = error_of("--job.config_file", path, "--step=4", "stray", "--optimizer.eps=tiny", "--checkpoint.interval")
    assert message.splitlines() == [
        "7 options cannot be used:",
        "  stray: unexpected argument; every option starts with --",
        "  --checkpoint.interval: a value is missing; one that starts with -- is given as --checkpoint.interval=VALUE",
        f"  {path}: training.seqlen = 3: unknown option; did you mean training.seq_len?",
        f"  {path}: optimzer.lr = 3: unknown option; did you mean optimizer.lr?",
        "  --step=4: unknown option; did you mean training.steps?",
        f'  {path}: training.steps = "5": it must be a whole number',
        "  --optimizer.eps=tiny: it must be a number",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[training]\nsteps = 1.5", "training.steps = 1.5: it must be a whole number"),
        ("[training]\nsteps = true", "training.steps = true: it must be a whole number"),
        ("[optimizer]\nlr = '1e-3'", 'optimizer.lr = "1e-3": it must be a number'),
        ("[lr_scheduler]\ndecay_ratio = false", "lr_scheduler.decay_ratio = false: it must be a number"),
        ("[debug]\ndeterministic = 1", "debug.deterministic = 1: it must be true or false"),
        ("[model]\nflavor = 8", "model.flavor = 8: it must be a text"),
        ("[optimizer]\nname = 'adamw'", "it must be one of AdamW, Adam"),
        ("[optimizer.name]\nx = 1", "it must be one of AdamW, Adam"),
        ("training = 5", "training = 5: this is a section, written [training]"),
        ("steps = 5", "steps = 5: unknown option; did you mean training.steps?"),
        ("[zzz]\nqqq = 5", "zzz.qqq = 5: unknown option; --help lists all options"),
    ],
)
def test_a_file_with_a_wrong_value(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, line)
    text = error_of(f"--job.config_file={path}")
    assert text.startswith(f"{path}: ")
    assert message in text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--training.steps=1e3", "--training.steps=1e3: it must be a whole number"),
        ("--debug.deterministic=maybe", "--debug.deterministic=maybe: it must be true or false"),
        (
            "--parallelism.context_parallel_rotate_method=alltoal",
            "--parallelism.context_parallel_rotate_method=alltoal: it must be one of allgather, alltoall",
        ),
        ("--compile.backend=eager", "it must be one of inductor, aot_eager"),
        ("--parallelism.context_parallel_method=flex", "it must be one of ring, gather, auto"),
        (
            "--parallelism.context_parallel_load_balancer=zigzag",
            "it must be one of auto, headtail, none, per_document, ptrr, greedy",
        ),
        ("--model.attn_mask=prefix", "it must be one of causal, document"),
        ("--model.attn_type=flash", "it must be one of sdpa, flex, varlen"),
        ("--training.lr=1", "--training.lr=1: unknown option; did you mean optimizer.lr?"),
        (
            "--profiling.save_trace_folder=x",  # and not metrics.save_tb_folder, which is as near but elsewhere
            "did you mean profiling.save_traces_folder?",
        ),
        ("--debug.no_deterministic=True", "unknown option; did you mean debug.deterministic?"),
        ("--job.description=\udcff", r"'--job.description=\udcff': not UTF-8"),
        ("-x", "-x: unexpected argument"),
        ("--", "--: unexpected argument"),
    ],
)
def test_a_wrong_argument(argument: str, message: str) -> None:
    assert message in error_of(argument)


def test_nothing_but_the_error_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    error_of("--training.steps=x")
    assert capfd.readouterr() == ("", "")


def test_missing_file_is_named() -> None:
    assert "--job.config_file=/no/such.toml: cannot be read: No such file" in error_of(
        "--job.config_file=/no/such.toml"
    )


def test_folder_as_file_is_named(tmp_path: Path) -> None:
    assert f"--job.config_file={tmp_path}: cannot be read: Is a directory" in error_of(f"--job.config_file={tmp_path}")


def test_invalid_toml_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nsteps = 5\nseq_len = = 3\n")
    message = error_of(f"--job.config_file={path}")
    assert message.startswith(f"--job.config_file={path}: not valid: ")
    assert "at line 3, column" in message


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"[job]\ndescription = '\xff'\n")
    assert "not valid: 'utf-8' codec can't decode byte 0xff" in error_of(f"--job.config_file={path}")


def test_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 5\r\n")
    assert load_config([f"--job.config_file={path}"])[0].training.steps == 5


def test_file_that_names_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "[job]\nconfig_file = 'other.toml'\n")
    assert "a file cannot name another one" in error_of(f"--job.config_file={path}")


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_explains_every_option_and_exits_0(capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--training.steps", "3", word])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [option for option in OPTIONS if f"--{option} " not in text] == []
    # One field without a help text would be followed by its default at once.
    words = " ".join(text.replace("│", " ").split())
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            explanation = words.split(f"--{section}.{field.name} ")[1].split("(default:")[0].split()
            assert len(explanation) >= 4, (section, field.name)


def test_printed_config_runs_again(tmp_path: Path) -> None:
    argv = [
        "--job.print_config",
        "--training.steps=3",
        "--lr_scheduler.decay_ratio=0.25",
        '--job.description=a "b" \\ \n\t',
    ]
    config, _ = load_config(argv)
    again, _ = load_config([f"--job.config_file={write(tmp_path, to_toml(config))}"])
    assert not again.job.print_config
    expected = dataclasses.replace(config.job, print_config=False, config_file=again.job.config_file)
    assert again == dataclasses.replace(config, job=expected)


@settings(deadline=None, max_examples=25)
@given(
    description=st.text(st.characters(exclude_categories=["Cs"])),
    lr=st.floats(allow_nan=False),
    steps=st.integers(),
    deterministic=st.booleans(),
    ratio=st.none() | st.floats(0, 1),
)
def test_any_config_survives_toml(
    tmp_path_factory: pytest.TempPathFactory,
    description: str,
    lr: float,
    steps: int,
    deterministic: bool,
    ratio: float | None,
) -> None:
    config = JobConfig()
    config = dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, description=description),
        optimizer=dataclasses.replace(config.optimizer, lr=lr),
        training=dataclasses.replace(config.training, steps=steps),
        debug=dataclasses.replace(config.debug, deterministic=deterministic),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, decay_ratio=ratio),
    )
    path = write(tmp_path_factory.getbasetemp(), to_toml(config))
    again, _ = load_config([f"--job.config_file={path}"])
    assert again == dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=path))
