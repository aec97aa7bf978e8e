"""Who speaks on the console, and in which colour."""

import logging

import pytest

from torchtitan.tools.logging import init_logging, speaks


@pytest.mark.parametrize(
    ("local_rank", "log_rank", "expected"),
    [(None, None, True), ("0", None, True), ("1", None, False), ("1", "0,1", True), ("0", "1", False)],
)
def test_log_rank_chooses_who_speaks(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, log_rank: str | None, expected: bool
) -> None:
    for name, value in (("LOCAL_RANK", local_rank), ("LOG_RANK", log_rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert speaks() is expected


@pytest.fixture
def restored_logger() -> None:
    """Put the package's logger back after a test."""
    logger = logging.getLogger("torchtitan")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def _lines(capsys: pytest.CaptureFixture[str], color: bool) -> list[str]:
    init_logging(color=color)
    logger = logging.getLogger("torchtitan.somewhere")
    logger.info("told")
    logger.warning("warned")
    logger.error("failed")
    return capsys.readouterr().err.splitlines()


@pytest.mark.usefixtures("restored_logger")
def test_a_silent_rank_still_tells_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOG_RANK", raising=False)
    (line,) = _lines(capsys, color=False)
    assert line.startswith("[titan] ") and line.endswith(" - ERROR - failed")


@pytest.mark.usefixtures("restored_logger")
@pytest.mark.parametrize(
    ("force", "color", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_colours_need_a_terminal_and_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], force: bool, color: bool, expected: bool
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOG_RANK", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if force:
        monkeypatch.setenv("FORCE_COLOR", "1")
    told, warned, failed = _lines(capsys, color)
    assert "\033[" not in told
    assert ("\033[33m" in warned) is expected
    assert ("\033[31m" in failed) is expected
