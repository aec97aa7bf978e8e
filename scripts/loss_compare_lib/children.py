"""Child processes that end with this one: after an error, Ctrl-C, SIGTERM and SIGHUP too."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

_POLL_S = 0.05
_WAITS_S = (60.0, 10.0, 10.0)  # a run saves its state when asked first; the launcher ends it when asked again


class Stopped(Exception):
    """A stop signal came while a child was waited for, which has ended since."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopSignals:
    """Stop signals are only noted, and heard while a child is waited for: so no signal can cut a cleanup short."""

    def __init__(self) -> None:
        self.number = 0  # the first one; 0: none
        self.count = 0

    def install(self) -> None:
        """Note signals from now on; SIGHUP stays ignored under nohup."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1


def run_child(
    command: Sequence[str],
    signals: StopSignals,
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    errors: IO[bytes] | int | None,
) -> int:
    """Run a command in a session of its own and return its exit code; nothing of its process group is left.

    Raises: Stopped, if a stop signal came before the command's end.
    """
    if signals.number:
        raise Stopped(signals.number)
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        while process.poll() is None and not signals.number:
            time.sleep(_POLL_S)
        if process.returncode is None:
            raise Stopped(signals.number)
        return process.returncode
    finally:
        _stop(process, signals)


def _stop(process: "subprocess.Popen[bytes]", signals: StopSignals) -> None:
    """Have a process and its group end: asked, asked again, killed; each further stop signal shortens a wait."""
    for wait_s in _WAITS_S:
        if process.poll() is not None:
            break
        process.terminate()
        deadline, count = time.monotonic() + wait_s, signals.count
        while process.poll() is None and time.monotonic() < deadline and signals.count == count:
            time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
