"""What every module put out, per token, in a form that can be compared between layouts.

Letters: B batch, S sequence (n of it here), M modules.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Fingerprints:
    """One row per module that was called, in the order in which their outputs were complete."""

    names: list[str]
    projections: torch.Tensor  # fp64 [B, S, M]: each token's output times a fixed random vector
    norms: torch.Tensor  # fp64 [B, S, M]: and its 2-norm
    hashes: torch.Tensor  # int64 [B, S, M]: a sum over its bits, with a weight per element

    def first_divergence(self, other: "Fingerprints", tolerance: float) -> tuple[str, int, int] | None:
        """Return (module, sequence, token) of the first output that is off by more than `tolerance` of its norm."""
        distance = (self.projections - other.projections).abs()
        off = ~(distance <= tolerance * other.norms)  # true for NaN
        return self._first(off)

    def first_other_bits(self, other: "Fingerprints") -> tuple[str, int, int] | None:
        """Return (module, sequence, token) of the first output that is not the same bit for bit."""
        return self._first(self.hashes != other.hashes)

    def _first(self, off: torch.Tensor) -> tuple[str, int, int] | None:
        modules = off.flatten(0, 1).any(0).nonzero()
        if not len(modules):
            return None
        module = int(modules[0])
        sequence, token = off[:, :, module].nonzero()[0].tolist()
        return self.names[module], sequence, token


class FingerprintRecorder:
    """Hooks every module of a model while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: list[str] = []
        self.columns: list[torch.Tensor] = []  # [B, n, 3] each, as int64 bits

    def __enter__(self) -> "FingerprintRecorder":
        self.handles = [
            module.register_forward_hook(lambda _, args, out, name=name: self._record(name, out))
            for name, module in self.model.named_modules()
            if name
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def rows(self) -> torch.Tensor:
        """Return what was recorded of this rank's tokens: int64 [B, n, 3 M], for `fingerprints`."""
        return torch.cat(self.columns, dim=-1)

    def _record(self, name: str, out: object) -> None:
        if not isinstance(out, torch.Tensor) or out.ndim not in (3, 4) or not out.is_floating_point():
            return
        by_token = out.detach() if out.ndim == 3 else out.detach().transpose(1, 2).flatten(2)  # [B, n, features]
        self.names.append(name)
        self.columns.append(_row(by_token))


def fingerprints(names: list[str], rows: torch.Tensor) -> Fingerprints:
    """Return the fingerprints of whole sequences from their rows, int64 [B, S, 3 M]."""
    projections, norms, hashes = rows.unflatten(-1, (-1, 3)).unbind(-1)
    projections, norms = (part.contiguous().view(torch.float64) for part in (projections, norms))
    return Fingerprints(names, projections, norms, hashes)


def _row(by_token: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(by_token.size(-1))
    vector = torch.randn(by_token.size(-1), generator=generator, dtype=torch.float64).to(by_token.device)
    odd = torch.randint(2**62, vector.shape, generator=generator).to(by_token.device) | 1
    wide = by_token.double()
    summed = (wide @ vector, wide.norm(dim=-1))
    bits = (wide.view(torch.int64) * odd).sum(-1)  # modulo 2^64; a cast to fp64 keeps apart what was apart
    return torch.stack([*(part.view(torch.int64) for part in summed), bits], dim=-1).cpu()
