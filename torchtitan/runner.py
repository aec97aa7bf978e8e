"""What the trainer runs a batch through; it hides how the model is laid out."""

from dataclasses import replace

from torchtitan.batch import Batch
from torchtitan.components.loss import ChunkedCrossEntropy, LossSum
from torchtitan.models.common.decoder import Decoder


class SingleStageRunner:
    """The whole model on every rank of the pipeline axis, which is one rank long."""

    def __init__(self, model: Decoder, loss: ChunkedCrossEntropy) -> None:
        self.model = model
        self.loss = loss

    def forward_backward(self, batch: Batch, num_tokens: float) -> LossSum:
        """Add the gradients of (summed loss / num_tokens); returns this rank's summed loss."""
        loss = self.forward(batch)
        (loss.total / num_tokens).backward()
        return replace(loss, total=loss.total.detach())

    def forward(self, batch: Batch) -> LossSum:
        """Return this rank's summed loss over its valid tokens."""
        hidden = self.model(batch.inputs, batch.positions, batch.masks)
        return self.loss(self.model.output, hidden, batch.labels)
