"""Train the small tokenizer that comes with the package, from the running Python's standard library.

Writes a rank file in Llama 3's format. Equal library, equal file: training does not depend on the order of documents.
"""

import argparse
import base64
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from torchtitan.components.tokenizer import LLAMA3_SPLIT_PATTERN, NUM_SPECIAL_TOKENS, PACKAGED_TOKENIZER
from torchtitan.data.documents import find_documents


def train(texts: Iterator[str], num_ranks: int) -> list[bytes]:
    """Return the byte sequences of a byte-level BPE by rank."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=True)
    tokenizer.train_from_iterator(texts, trainer)
    by_rank = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    byte_of = _bytes_by_letter()
    return [bytes(byte_of[letter] for letter in token) for token, _ in by_rank]


def _bytes_by_letter() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens in all, the 256 special ones included")
    parser.add_argument("--output", type=Path, default=PACKAGED_TOKENIZER, help="file to write")
    arguments = parser.parse_args()
    texts = (document.text for document in find_documents("python_stdlib", "", "text"))
    tokens = train(texts, arguments.vocab_size - NUM_SPECIAL_TOKENS)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(lines), encoding="ascii")
    print(f"wrote {len(tokens)} ranks to {arguments.output}")


if __name__ == "__main__":
    main()
