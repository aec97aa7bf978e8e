"""Text to token ids and back: a tiktoken rank file in Llama 3's format, or a Hugging Face tokenizer.json."""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchtitan.errors import DataError, option_error

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

PACKAGED_TOKENIZER = Path(__file__).parent.parent / "assets" / "tokenizer" / "tokenizer.model"

# Source of the pattern and of the special tokens: Llama 3's model card and its tokenizer.json (version 3.1).
LLAMA3_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL_TOKENS = 256
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
_NAMED_SPECIAL_TOKENS = [
    BOS,
    EOS,
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]

_SEGMENT_CHARS = 1_000_000
# No alternative of the pattern matches past a line feed into what follows it, unless that is white space.
_SAFE_CUT = re.compile(r"\n(?=\S)")

# A run of a million spaces ends in a Rust panic; 25,000 is where Llama 3's own tokenizer starts to cut.
_BLOCK_CHARS = 25_000
# White space as the Rust side has it: Python's \s holds four control characters more.
_SPACE = re.compile(r"[^\S\x1c-\x1f]")
_SOLID = re.compile(r"[\S\x1c-\x1f]")


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer. Text never makes a special token, whatever it spells."""

    vocab_size: int
    bos_id: int
    eos_id: int
    fingerprint: str  # sha256; two tokenizers that give other ids have other fingerprints

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as uint32, worked out by all cores."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD."""


def build_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer in a file, or in a folder with tokenizer.model or tokenizer.json; "" is the packaged one.

    Raises:
        ConfigError: there is no such file.
        DataError: the file is damaged; the message names it and the line.
    """
    file = _find(path) if path else PACKAGED_TOKENIZER
    return HuggingFaceTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)


def _find(path: str) -> Path:
    place = Path(path).expanduser()
    candidates = [place / "tokenizer.model", place / "tokenizer.json"] if place.is_dir() else [place]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    fact = "the folder holds no tokenizer.model and no tokenizer.json" if place.is_dir() else "there is no such file"
    rule = "a tokenizer is read from a local path, never from the network"
    remedy = "give a file, a folder, or nothing for the packaged one"
    raise option_error("model.tokenizer_path", path, fact, rule, remedy)


class TiktokenTokenizer:
    """Byte-level BPE by tiktoken, with Llama 3's split pattern and 256 special tokens after the ranks."""

    def __init__(self, file: Path) -> None:
        content = _read(file)
        ranks = parse_ranks(content, file)
        specials = llama3_special_tokens(len(ranks))
        self._encoding = _build_encoding(ranks, specials)
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id, self.eos_id = specials[BOS], specials[EOS]
        self.fingerprint = hashlib.sha256(b"tiktoken, llama 3\n" + content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a long one is cut where that leaves the ids as they are."""
        return list(chain.from_iterable(map(self._encode_segment, cut_segments(replace_surrogates(text)))))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as uint32."""
        segments = [list(cut_segments(replace_surrogates(text))) for text in texts]
        with ThreadPoolExecutor() as pool:  # tiktoken lets go of the interpreter lock
            ids = pool.map(self._encode_array, chain.from_iterable(segments))
            return [np.concatenate([next(ids) for _ in parts]) if parts else _NO_IDS for parts in segments]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the exact bytes of the ids."""
        return self._encoding.decode_bytes(ids)

    def _encode_segment(self, segment: str) -> Iterator[int]:
        return chain.from_iterable(map(self._encoding.encode_ordinary, cut_runs(segment)))

    def _encode_array(self, segment: str) -> np.ndarray:
        return np.fromiter(self._encode_segment(segment), np.uint32)


_NO_IDS = np.zeros(0, np.uint32)


class HuggingFaceTokenizer:
    """A tokenizer.json; BOS and EOS come from the tokenizer_config.json beside it, else they are Llama 3's."""

    def __init__(self, file: Path) -> None:
        content = _read(file)
        self._tokenizer = _load_huggingface(content, file)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        bos, eos = _find_bos_eos(file)
        self.bos_id, self.eos_id = (_special_id(token, vocabulary, file) for token in (bos, eos))
        self.fingerprint = hashlib.sha256(f"tokenizers\n{bos}\n{eos}\n".encode() + content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as uint32."""
        clean = [replace_surrogates(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def parse_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    """Return the byte sequences of a rank file with their ranks: one base64 token and one rank per line.

    Raises:
        DataError: a line is not of that form, a rank is out of order, or a single byte has no rank.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        token, rank = _parse_rank_line(line, where)
        if rank != len(ranks):
            raise DataError(f"{where}: rank {rank} where {len(ranks)} is due; ranks run from 0 without gaps")
        if token in ranks:
            raise DataError(f"{where}: the token of rank {rank} has rank {ranks[token]} already")
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{file}: {len(missing)} of the 256 single bytes have no rank, the first is 0x{missing[0]:02x}")
    return ranks


def _parse_rank_line(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    try:
        token, rank = fields
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        remedy = "if this is a SentencePiece model, give the tokenizer.json of the same model instead"
        raise DataError(f"{where}: {line[:40]!r} is not a base64 token and a rank; {remedy}") from None


def llama3_special_tokens(num_ranks: int) -> dict[str, int]:
    """Return Llama 3's 256 special tokens with their ids, which follow the ranks."""
    num_reserved = NUM_SPECIAL_TOKENS - len(_NAMED_SPECIAL_TOKENS)
    names = _NAMED_SPECIAL_TOKENS + [f"<|reserved_special_token_{3 + i}|>" for i in range(num_reserved)]
    return {name: num_ranks + i for i, name in enumerate(names)}


def cut_segments(text: str, segment_chars: int = _SEGMENT_CHARS) -> Iterator[str]:
    """Yield a text in parts of about `segment_chars`, cut after line feeds where no pre-token can reach over."""
    start = 0
    while len(text) - start > segment_chars:
        cut = _SAFE_CUT.search(text, start + segment_chars)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    if start < len(text):
        yield text[start:] if start else text


def cut_runs(text: str, block_chars: int = _BLOCK_CHARS) -> Iterator[str]:
    """Yield a text whole, unless white space, or its absence, fills a block; then cut around such blocks.

    Every run of at least twice `block_chars` fills an aligned block, so no longer one is left; shorter than
    `block_chars` a run fills none, so ordinary text is never cut.
    """
    start = 0
    for left in range(0, len(text) - block_chars + 1, block_chars):
        right = left + block_chars
        if _SPACE.search(text, left, right) and _SOLID.search(text, left, right):
            continue
        if start < left:
            yield text[start:left]
        yield text[left:right]
        start = right
    if start < len(text):
        yield text[start:] if start else text


def replace_surrogates(text: str) -> str:
    """Return a text that UTF-8 can hold: pairs of surrogates joined, lone ones (JSON can spell them) U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _build_encoding(ranks: dict[bytes, int], specials: dict[str, int]) -> "tiktoken.Encoding":
    import tiktoken

    return tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _load_huggingface(content: bytes, file: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the Rust side raises plain Exceptions and ValueErrors
        raise DataError(f"{file}: not a tokenizer.json that the tokenizers library can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|eot_id|>" in a text is text
    return tokenizer


def _find_bos_eos(file: Path) -> tuple[str, str]:
    config_file = file.with_name("tokenizer_config.json")
    if not config_file.is_file():
        return BOS, EOS
    try:
        config = json.loads(_read(config_file))
    except ValueError as error:
        raise DataError(f"{config_file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"{config_file}: not a JSON object")
    return _token_text(config.get("bos_token"), BOS), _token_text(config.get("eos_token"), EOS)


def _token_text(entry: Any, default: str) -> str:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else default


def _special_id(token: str, vocabulary: dict[str, int], file: Path) -> int:
    if token not in vocabulary:
        raise DataError(
            f"{file}: no token {token!r}, and each document needs one before and one after it; name them as bos_token "
            "and eos_token in a tokenizer_config.json beside it"
        )
    return vocabulary[token]
