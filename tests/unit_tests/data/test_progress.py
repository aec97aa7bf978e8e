"""A long tokenising must show that it is alive, and must not fill a log file with a bar."""

import io
import sys

import pytest

from torchtitan.data import progress
from torchtitan.data.progress import Progress


class Terminal(io.StringIO):
    """Takes text and says that it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_a_log_has_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    with caplog.at_level("INFO"):
        bar = Progress("mine", 4_000_000)
        for seconds in (4, 4, 4, 4, 4, 4):
            now[0] += seconds
            bar.add(500_000)
        bar.close()
    assert caplog.messages == ["Data: tokenised 1.5 of 4.0 MB of mine", "Data: tokenised 3.0 of 4.0 MB of mine"]
    assert error.getvalue() == ""


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        bar = Progress("mine", 4_000_000)
        bar.add(4_000_000)
        bar.close()
    assert "Tokenising mine: 100%" in terminal.getvalue()
    assert caplog.messages == []
