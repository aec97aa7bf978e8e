"""The wish to stop, as a signal leaves it."""

import os
import signal
import time
from types import FrameType

_SAME_WISH_S = 2.0  # torchrun passes on to its workers the signal that a terminal sends to both


class StopSignal:
    """True once SIGTERM or SIGINT came; the training loop looks at it between steps."""

    def __init__(self) -> None:
        self.name = ""  # of the signal that came; empty: none
        self.received = 0.0

    def install(self) -> None:
        """Take the signals over, from now to the end of the process."""
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def __bool__(self) -> bool:
        return bool(self.name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name and time.monotonic() - self.received > _SAME_WISH_S:
            signal.signal(number, signal.SIG_DFL)  # asked again: do not wait for the step to end
            os.kill(os.getpid(), number)
        elif not self.name:
            self.name, self.received = signal.Signals(number).name, time.monotonic()
