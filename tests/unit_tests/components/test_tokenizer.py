"""Text -> ids -> text must lose nothing; what a tokenizer file lacks must be named, with its line."""

import base64
import json
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.components.tokenizer import (
    LLAMA3_SPLIT_PATTERN,
    PACKAGED_TOKENIZER,
    TiktokenTokenizer,
    build_tokenizer,
    cut_runs,
    cut_segments,
    parse_ranks,
)
from torchtitan.errors import ConfigError, DataError

PACKAGED = build_tokenizer("")
BYTES = [bytes([byte]) for byte in range(256)]

# Letters of every class of the split pattern, and what tokenizers trip over.
HOSTILE = st.text(
    st.one_of(
        st.sampled_from(" \n\r\t\u2028\u00a0\x1c\x00aZé漢1²'!_|<>\u0301\U0001f600\ufffd\ufeff"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=200,
)


def write_ranks(file: Path, tokens: list[bytes]) -> Path:
    """Write a rank file of these tokens."""
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return file


@cache
def plain() -> tiktoken.Encoding:
    """Return tiktoken alone, without any cutting."""
    ranks = parse_ranks(PACKAGED_TOKENIZER.read_bytes(), PACKAGED_TOKENIZER)
    return tiktoken.Encoding("plain", pat_str=LLAMA3_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})


def plain_ids(text: str) -> list[int]:
    """Return the ids of tiktoken alone."""
    return plain().encode_ordinary(text)


def test_packaged_vocabulary_is_4096_with_llama3s_special_tokens() -> None:
    assert (PACKAGED.vocab_size, PACKAGED.bos_id, PACKAGED.eos_id) == (4096, 3840, 3841)
    assert PACKAGED.decode([3840, 3841, 3846, 4095]) == (
        "<|begin_of_text|><|end_of_text|><|start_header_id|><|reserved_special_token_247|>"
    )


def test_ids_of_llama3s_own_size(tmp_path: Path) -> None:
    """128,000 ranks give Meta's numbers: BOS 128000, EOT 128009, 128,256 in all."""
    more = [f"{number:06d}".encode() for number in range(128_000 - 256)]
    tokenizer = build_tokenizer(str(write_ranks(tmp_path / "tokenizer.model", BYTES + more)))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128_256, 128_000, 128_001)
    assert tokenizer.decode([128_009]) == "<|eot_id|>"
    assert tokenizer.decode(tokenizer.encode("def f(x):\n    return 12")) == "def f(x):\n    return 12"


def test_every_byte_has_a_token_of_its_own() -> None:
    tokenizer = TiktokenTokenizer(PACKAGED_TOKENIZER)
    ranks = parse_ranks(PACKAGED_TOKENIZER.read_bytes(), PACKAGED_TOKENIZER)
    assert [tokenizer.decode_bytes([ranks[byte]]) for byte in BYTES] == BYTES


def test_every_code_point_survives() -> None:
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert PACKAGED.decode(PACKAGED.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_hostile_text_survives_and_special_tokens_in_text_are_text(text: str) -> None:
    text = f"<|end_of_text|>{text}<|begin_of_text|>"
    ids = PACKAGED.encode(text)
    assert PACKAGED.decode(ids) == text
    assert max(ids) < PACKAGED.bos_id
    assert ids == plain_ids(text)
    assert PACKAGED.encode_batch([text])[0].tolist() == ids


@pytest.mark.parametrize("run", [" ", "a", "!", "\n", " \n", "7", "漢", "!\x1c", "\x1c ", "\u0301", "ab\x1c "])
def test_a_million_characters_in_a_run_are_quick_and_lossless(run: str) -> None:
    """Alone, tiktoken ends in a Rust panic on the first of them; quadratic time would be minutes."""
    text = run * (1_000_000 // len(run))
    start = time.monotonic()
    assert PACKAGED.decode(PACKAGED.encode(text)) == text
    assert time.monotonic() - start < 30


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([" ", "\n", "!", "a", "a b\nc", "  \n\nx", "\x1c"]), max_size=60).map("".join))
def test_runs_are_cut_only_where_they_fill_a_block(text: str) -> None:
    block = 8
    parts = list(cut_runs(text, block))
    assert "".join(parts) == text
    # Only a run of a whole block may be cut, and none of two blocks may be left.
    assert len(parts) <= 1 or any(_longest_run(part) >= block for part in parts)
    assert all(_longest_run(part) < 2 * block for part in parts)


def _longest_run(text: str) -> int:
    kinds = [letter.isspace() and letter not in "\x1c\x1d\x1e\x1f" for letter in text]
    longest = length = 0
    for i, kind in enumerate(kinds):
        length = length + 1 if i and kind == kinds[i - 1] else 1
        longest = max(longest, length)
    return longest


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([" ", "\n", "\r", "!", "a", "1", "'s", "\x1c", "\u2028", "\u00a0"])).map("".join))
def test_cutting_a_long_text_leaves_its_ids(text: str) -> None:
    segments = list(cut_segments(text, segment_chars=3))
    assert "".join(segments) == text
    assert [id_ for segment in segments for id_ in plain_ids(segment)] == plain_ids(text)


def test_long_text_is_cut_and_joined_again() -> None:
    text = "x = 1\n  y\n" * 150_000
    (ids,) = PACKAGED.encode_batch([text])
    assert len(list(cut_segments(text))) == 2
    assert ids.dtype == np.uint32
    assert ids.tolist() == PACKAGED.encode(text) == plain_ids(text)


def test_surrogates_are_joined_or_replaced() -> None:
    """JSON can spell lone surrogates; UTF-8 cannot hold them."""
    assert PACKAGED.decode(PACKAGED.encode("a\ud83d\ude00b\ud800c")) == "a\U0001f600b\ufffdc"


def test_empty_texts_have_no_ids() -> None:
    assert PACKAGED.encode("") == []
    assert [ids.tolist() for ids in PACKAGED.encode_batch(["", "a", ""])] == [[], PACKAGED.encode("a"), []]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"YQ== 0\n!!! 1\n", r"tokenizer.model, line 2: b'!!! 1' is not a base64 token and a rank; .*SentencePiece"),
        (b"YQ== 0\nYg==\n", r"tokenizer.model, line 2: b'Yg==' is not a base64 token and a rank"),
        (b"YQ== zero\n", r"tokenizer.model, line 1: .* is not a base64 token and a rank"),
        (b"YQ== 0\nYg== 2\n", r"tokenizer.model, line 2: rank 2 where 1 is due; ranks run from 0 without gaps"),
        (b"YQ== 0\nYQ== 1\n", r"tokenizer.model, line 2: the token of rank 1 has rank 0 already"),
        (b"YQ== 0\n\n", r"tokenizer.model: 255 of the 256 single bytes have no rank, the first is 0x00"),
        (b"", r"tokenizer.model: 256 of the 256 single bytes have no rank, the first is 0x00"),
    ],
)
def test_damaged_rank_files_are_named(tmp_path: Path, lines: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(lines)
    with pytest.raises(DataError, match=message):
        build_tokenizer(str(tmp_path))


def test_a_lost_rank_line_is_named(tmp_path: Path) -> None:
    lines = PACKAGED_TOKENIZER.read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:100] + lines[101:]))
    with pytest.raises(DataError, match="line 101: rank 101 where 100 is due"):
        build_tokenizer(str(tmp_path))


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--model.tokenizer_path=.*/no: there is no such file; .*never from the net"
    ):
        build_tokenizer(str(tmp_path / "no"))
    with pytest.raises(ConfigError, match=r"holds no tokenizer.model and no tokenizer.json"):
        build_tokenizer(str(tmp_path))


def test_a_changed_file_changes_ids_and_fingerprint(tmp_path: Path) -> None:
    """The loader that tiktoken has would keep returning the first file for the same path."""
    file = write_ranks(tmp_path / "tokenizer.model", [*BYTES, b"ab"])
    first = build_tokenizer(str(file))
    write_ranks(file, [*BYTES, b"bc"])
    second = build_tokenizer(str(file))
    assert (first.encode("abc"), second.encode("abc")) == ([256, 99], [97, 256])
    assert first.fingerprint != second.fingerprint


def huggingface_file(folder: Path, specials: list[str]) -> str:
    """Write a byte-level BPE of a few merges as tokenizer.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_huggingface_tokenizer_with_llama3s_specials(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(huggingface_file(tmp_path, ["<|begin_of_text|>", "<|end_of_text|>"]))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (260, 258, 259)
    text = "abcab <|end_of_text|> é\n"
    ids = tokenizer.encode(text)
    assert ids[:2] == [257, 256]
    assert max(ids) < 258, "a special token that a text spells out is text"
    assert tokenizer.decode(ids) == text, "neither truncated nor padded, whatever the file says"
    assert [batch.tolist() for batch in tokenizer.encode_batch([text, ""])] == [ids, []]
    assert tokenizer.encode("\ud800") == tokenizer.encode("\ufffd")


def test_huggingface_bos_and_eos_from_the_config_beside(tmp_path: Path) -> None:
    folder = huggingface_file(tmp_path, ["<s>", "</s>"])
    with pytest.raises(DataError, match=r"no token '<\|begin_of_text\|>'.*tokenizer_config.json"):
        build_tokenizer(folder)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    tokenizer = build_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (258, 259)
    fingerprint = tokenizer.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>", "eos_token": "</s>"}))
    assert build_tokenizer(folder).fingerprint != fingerprint
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: not valid JSON"):
        build_tokenizer(folder)


def test_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer.json that the tokenizers library can read"):
        build_tokenizer(str(tmp_path))


def test_packaged_ranks_are_what_the_training_script_makes(tmp_path: Path) -> None:
    """On a fixed text, as the library of another Python gives other ranks: byte-level, complete, deterministic."""
    from scripts.train_tokenizer import train

    texts = ["def f(x):\n    return x\n" * 20, "class A:\n    pass\n" * 20, "naïve 漢字\x00"]
    tokens = train(iter(texts), 300)
    assert tokens == train(iter(reversed(texts)), 300)
    assert sorted(tokens[:256]) == BYTES
    tokenizer = build_tokenizer(str(write_ranks(tmp_path / "tokenizer.model", tokens)))
    assert tokenizer.vocab_size == len(tokens) + 256
    assert tokenizer.decode(tokenizer.encode("".join(texts))) == "".join(texts)
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
