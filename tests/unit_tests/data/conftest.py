"""A tokenizer whose ids are bytes, and documents of given lengths."""

import base64
from pathlib import Path

import numpy as np
import pytest

from torchtitan.components.tokenizer import TiktokenTokenizer
from torchtitan.data.cache import TokenFile

BOS, EOS = 256, 257


class CountingTokenizer(TiktokenTokenizer):
    """Ids are UTF-8 bytes; counts the texts that it was given."""

    num_texts = 0

    def encode_batch(self, texts):  # type: ignore[no-untyped-def]
        """Count and encode."""
        self.num_texts += len(texts)
        return super().encode_batch(texts)


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> CountingTokenizer:
    """Return a tokenizer whose ids are bytes, BOS 256 and EOS 257."""
    file = tmp_path / "bytes" / "tokenizer.model"
    file.parent.mkdir()
    file.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)))
    return CountingTokenizer(file)


def token_file(lengths: list[int]) -> TokenFile:
    """Return documents of these lengths with a different token at every place: its place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenFile(Path("none"), np.arange(offsets[-1], dtype=np.uint32), offsets, "fingerprint")
