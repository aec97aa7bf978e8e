"""The wish to stop, as a signal leaves it."""

import signal
from types import FrameType


class StopSignal:
    """True once SIGTERM or SIGINT came; the training loop looks at it between steps."""

    def __init__(self) -> None:
        self.name = ""  # of the signal that came; empty: none

    def install(self) -> None:
        """Take the signals over, from now to the end of the process."""
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def __bool__(self) -> bool:
        return bool(self.name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
