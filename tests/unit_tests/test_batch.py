"""A batch knows how it is cut: cutting twice, or by another layout's shards, is an error."""

import pytest
import torch

from torchtitan.batch import Batch, CPLayout
from torchtitan.errors import TitanError

_LAYOUT = CPLayout(degree=2, load_balancer="headtail", seq_len=64)


def _tensors(length: int) -> list[torch.Tensor]:
    return [torch.arange(length).expand(2, -1) + offset for offset in range(3)]


def test_a_cut_batch_holds_the_shards_and_the_layout() -> None:
    batch, shards = Batch(*_tensors(64)), _tensors(32)
    cut = batch.cut(_LAYOUT, shards)
    assert (cut.inputs is shards[0], cut.labels is shards[1], cut.positions is shards[2]) == (True, True, True)
    assert cut.cp_layout == _LAYOUT and batch.cp_layout is None
    assert _LAYOUT.local_seq_len == 32


def test_cutting_a_cut_batch_names_both_local_lengths() -> None:
    cut = Batch(*_tensors(64)).cut(_LAYOUT, _tensors(32))
    with pytest.raises(TitanError, match=r"cut over 2 cp ranks already: its local length is 32, .* would leave 16"):
        cut.cut(CPLayout(2, "headtail", 32), _tensors(16))
    with pytest.raises(TitanError, match=r"again over 4 would leave 8"):
        cut.check_uncut(4)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_shard_must_have_the_length_of_the_layout(wrong: int) -> None:
    shards = _tensors(32)
    shards[wrong] = shards[wrong][:, :16]
    name = ("inputs", "labels", "positions")[wrong]
    with pytest.raises(TitanError, match=rf"^{name} has local length 16, the cp layout 32$"):
        Batch(*_tensors(64)).cut(_LAYOUT, shards)
