"""What the trainer runs a batch through; it hides how the model is laid out."""

import torch

from torchtitan.batch import Batch
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.models.common.decoder import Decoder


class SingleStageRunner:
    """The whole model on every rank of the pipeline axis, which is one rank long."""

    def __init__(self, model: Decoder, loss: ChunkedCrossEntropy) -> None:
        self.model = model
        self.loss = loss

    def forward_backward(self, batch: Batch, num_tokens: float) -> torch.Tensor:
        """Add the gradients of (summed loss / num_tokens); returns this rank's summed loss, fp64 []."""
        total = self.forward(batch)
        (total / num_tokens).backward()
        return total.detach()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return this rank's summed loss over its valid tokens, fp64 []."""
        hidden = self.model(batch.inputs, batch.positions)
        return self.loss(self.model.output, hidden, batch.labels)
