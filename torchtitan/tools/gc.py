"""Python's garbage collector, run at the same steps on all ranks: a pause on one rank makes all others wait."""

import gc


class ScheduledGC:
    """Turns automatic collection off and collects every `freq` steps instead."""

    def __init__(self, freq: int) -> None:
        self.freq = freq
        gc.disable()
        gc.collect()

    def run(self, step: int) -> None:
        """Collect the young generations if it is time."""
        if step % self.freq == 0:
            gc.collect(1)

    def close(self) -> None:
        """Give the collector back."""
        gc.enable()
