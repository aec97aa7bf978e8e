"""How far tokenising is: a bar on a terminal, a line every ten seconds elsewhere."""

import logging
import sys
import time

from tqdm import tqdm

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class Progress:
    """Counts bytes of source files up to `total`."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        hidden = not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=f"Tokenising {name}", unit="B", unit_scale=True, disable=hidden)
        self._next_log = time.monotonic() + _LOG_EVERY_S

    def add(self, num_bytes: int) -> None:
        """Count bytes, and show them if it is time to."""
        self.done += num_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_EVERY_S
            logger.info("Data: tokenised %.1f of %.1f MB of %s", self.done / 1e6, self.total / 1e6, self.name)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
