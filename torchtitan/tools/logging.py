"""The console's lines."""

import logging
import os
import sys

_COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
_RESET = "\033[0m"


class _Formatter(logging.Formatter):
    """Colours warnings and errors where that is wanted."""

    def __init__(self, color: bool) -> None:
        super().__init__("[titan] %(asctime)s - %(levelname)s - %(message)s")
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        start = _COLORS.get(record.levelno, "") if self.color else ""
        return f"{start}{line}{_RESET}" if start else line


def speaks() -> bool:
    """Return whether this rank is one that LOG_RANK (comma-separated local ranks; default 0) lets speak."""
    return os.environ.get("LOCAL_RANK", "0") in os.environ.get("LOG_RANK", "0").split(",")


def init_logging(color: bool) -> None:
    """Send log lines to stderr: all of a rank that speaks, the others' errors alone.

    Colours need a terminal: stderr itself, or that of the launcher, which says so by FORCE_COLOR.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(color and (sys.stderr.isatty() or "FORCE_COLOR" in os.environ)))
    root = logging.getLogger("torchtitan")
    root.handlers = [handler]
    root.setLevel(logging.INFO if speaks() else logging.ERROR)
    root.propagate = False
