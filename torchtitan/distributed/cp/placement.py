"""Where the tokens of a sequence lie on the ranks that share it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of the sequence that lie side by side on one rank."""

    start: int  # in the sequence
    local: int  # on the rank
    length: int


@dataclass(frozen=True)
class Placement:
    """Head-tail: rank r of P holds chunks r and 2P-1-r of 2P; else each rank holds one chunk of P."""

    seq_len: int
    degree: int
    balanced: bool

    def spans(self, rank: int) -> list[Span]:
        """Return what `rank` holds, in its local order."""
        local_len = self.seq_len // self.degree
        if not self.balanced:
            return [Span(rank * local_len, 0, local_len)]
        half, tail = local_len // 2, 2 * self.degree - 1 - rank
        if tail == rank + 1:  # the last rank's chunks are neighbours
            return [Span(rank * half, 0, local_len)]
        return [Span(rank * half, 0, half), Span(tail * half, half, half)]

    def copies(self) -> list[tuple[int, Span]]:
        """Return (rank, span) for all ranks."""
        return [(rank, span) for rank in range(self.degree) for span in self.spans(rank)]
