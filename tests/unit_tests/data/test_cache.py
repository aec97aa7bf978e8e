"""Tokenise once; never use a stale or damaged file; all ranks learn what went wrong."""

import json
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from tests.unit_tests.data.conftest import BOS, EOS, CountingTokenizer
from torchtitan.components.tokenizer import Tokenizer, build_tokenizer
from torchtitan.data import cache
from torchtitan.data.cache import TokenFile, default_cache_folder, open_or_build, read_token_file, token_file_path
from torchtitan.data.documents import find_local
from torchtitan.errors import DataError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of two documents and an empty one."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text, "other": "o"}) + "\n" for text in ("ab", "", "c")))
    return path


def build(file: Path, tokenizer: Tokenizer, folder: Path, text_field: str = "text") -> TokenFile:
    """Open or build the tokens of a file as the only rank."""
    return open_or_build(find_local(str(file), text_field), tokenizer, folder, build=True, barrier=lambda: None)


def test_documents_are_bos_text_eos(file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    found = build(file, byte_tokenizer, tmp_path / "cache")
    assert found.tokens.tolist() == [BOS, 97, 98, EOS, BOS, 99, EOS]
    assert found.tokens.dtype == "uint16"
    assert found.offsets.tolist() == [0, 4, 7]
    copy = pickle.loads(pickle.dumps(found))  # as a spawned worker gets it
    assert copy.tokens.tolist() == found.tokens.tolist() and copy.fingerprint == found.fingerprint


def test_a_second_start_reads_no_document(file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    first = build(file, byte_tokenizer, tmp_path / "cache")
    second = build(file, byte_tokenizer, tmp_path / "cache")
    assert byte_tokenizer.num_texts == 2
    assert second.path == first.path and second.tokens.tolist() == first.tokens.tolist()


def test_whatever_changes_the_tokens_rebuilds_them(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    paths = {build(file, byte_tokenizer, tmp_path / "cache").path}
    paths.add(build(file, build_tokenizer(""), tmp_path / "cache").path)
    paths.add(build(file, byte_tokenizer, tmp_path / "cache", "other").path)
    file.write_text(file.read_text().replace("ab", "xy"))  # of the same size
    changed = build(file, byte_tokenizer, tmp_path / "cache")
    paths.add(changed.path)
    assert len(paths) == 4
    assert changed.tokens.tolist() == [BOS, 120, 121, EOS, BOS, 99, EOS]


def test_the_fingerprint_is_of_the_tokens_not_of_the_place(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    """A checkpoint goes on where the same data lies elsewhere; documents cut elsewhere are other data."""
    first = build(file, byte_tokenizer, tmp_path / "cache").fingerprint
    other = tmp_path / "elsewhere.json"
    other.write_text('[{"text": "ab"}, {"text": "c"}]')
    assert build(other, byte_tokenizer, tmp_path / "cache").fingerprint == first
    other.write_text('[{"text": "ab"}, {"text": "d"}]')
    assert build(other, byte_tokenizer, tmp_path / "cache").fingerprint != first


def test_vocabularies_beyond_two_bytes(file: Path, tmp_path: Path) -> None:
    from tests.unit_tests.components.test_tokenizer import BYTES, write_ranks

    many = [f"{number:05d}".encode() for number in range(70_000)]
    tokenizer = build_tokenizer(str(write_ranks(tmp_path / "tokenizer.model", BYTES + many)))
    assert build(file, tokenizer, tmp_path / "cache").tokens.tolist() == [70256, 97, 98, 70257, 70256, 99, 70257]


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-1], lambda whole: whole[8:], lambda whole: b"", lambda whole: whole[:20]]
)
def test_a_damaged_file_is_built_again(
    damage: Callable[[bytes], bytes],
    file: Path,
    byte_tokenizer: CountingTokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = build(file, byte_tokenizer, tmp_path / "cache").path
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert read_token_file(path) is None
    build(file, byte_tokenizer, tmp_path / "cache")
    assert "is damaged" in caplog.text
    assert path.read_bytes() == whole


def test_a_killed_build_leaves_nothing_that_is_used(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"

    def die(source: object, target: object) -> None:
        raise SystemExit  # as a signal's handler would

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(cache.os, "replace", die)
        build(file, byte_tokenizer, folder)
    path = token_file_path(find_local(str(file), "text"), byte_tokenizer, folder)
    assert [left.name for left in folder.iterdir()] == [f"{path.name}.lock"]
    left_by_kill_9 = path.with_name(f"{path.name}.123-abc.tmp")
    left_by_kill_9.write_bytes(b"half")
    assert build(file, byte_tokenizer, folder).num_documents == 2
    assert not left_by_kill_9.exists()


def test_data_without_text_is_an_error(byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for content in ("", '{"text": ""}\n'):
        file.write_text(content)
        with pytest.raises(DataError, match=r"data.jsonl: 1 files were read and hold no document with text"):
            build(file, byte_tokenizer, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_names_the_variable(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"data.jsonl/cache: the cache .* Not a directory; .* TORCHTITAN_CACHE"):
        build(file, byte_tokenizer, file / "cache")


def test_a_full_disk_names_the_variable(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written here: No space left on device; set .*TORCHTITAN_CACHE"):
        build(file, byte_tokenizer, tmp_path / "cache")


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_folder() == Path("/a")
    monkeypatch.delenv("TORCHTITAN_CACHE")
    assert default_cache_folder() == Path("/b/torchtitan")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert default_cache_folder() == Path("/c/.cache/torchtitan")


def wait(barrier: threading.Barrier) -> None:
    """Pass a barrier of threads."""
    barrier.wait()


def on_ranks(file: Path, tokenizer: CountingTokenizer, folder: Path, num_ranks: int) -> list[TokenFile | DataError]:
    """Return what each rank of a node gets; the first builds."""
    barrier = threading.Barrier(num_ranks, timeout=30)

    def one(rank: int) -> TokenFile | DataError:
        try:
            return open_or_build(
                find_local(str(file), "text"),
                tokenizer,
                folder,
                build=rank == 0,
                barrier=lambda: wait(barrier),
            )
        except DataError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


def test_ranks_share_one_build(file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    found = on_ranks(file, byte_tokenizer, tmp_path / "cache", 4)
    assert byte_tokenizer.num_texts == 2
    assert [list(entry.tokens) for entry in found if isinstance(entry, TokenFile)] == [list(found[0].tokens)] * 4  # type: ignore[union-attr]


def test_an_error_of_the_building_rank_is_every_ranks(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    file.write_text(file.read_text() + '{"text": \n')
    errors = on_ranks(file, byte_tokenizer, tmp_path / "cache", 3)
    assert {type(error) for error in errors} == {DataError}
    assert len({str(error) for error in errors}) == 1
    assert "data.jsonl, line 4: not valid JSON" in str(errors[0])


def test_an_unwritable_folder_is_every_ranks_error(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    errors = on_ranks(file, byte_tokenizer, file / "cache", 3)
    assert len({str(error) for error in errors}) == 1
    assert "TORCHTITAN_CACHE" in str(errors[0])


def test_a_bug_in_the_builder_ends_the_others_too(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(texts: object) -> object:
        raise RuntimeError("a bug")

    monkeypatch.setattr(byte_tokenizer, "encode_batch", bug)
    barrier = threading.Barrier(2, timeout=30)
    documents = find_local(str(file), "text")

    def one(is_builder: bool) -> object:
        return open_or_build(
            documents, byte_tokenizer, tmp_path / "cache", build=is_builder, barrier=lambda: wait(barrier)
        )

    with ThreadPoolExecutor(2) as pool:
        builder, other = pool.submit(one, True), pool.submit(one, False)
        with pytest.raises(RuntimeError, match="a bug"):
            builder.result()
        with pytest.raises(DataError, match="RuntimeError: a bug"):
            other.result()
    monkeypatch.undo()
    assert all(isinstance(entry, TokenFile) for entry in on_ranks(file, byte_tokenizer, tmp_path / "cache", 2))
    assert not list((tmp_path / "cache").glob("*.error")), "an old message must not outlive its cause"


def test_two_jobs_at_once_build_once(file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(build, file, byte_tokenizer, tmp_path / "cache") for _ in range(2)]
        found = [job.result() for job in jobs]
    assert byte_tokenizer.num_texts == 2
    assert found[0].tokens.tolist() == found[1].tokens.tolist()


def test_ranks_pass_the_barrier_while_another_job_builds(
    file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective has a timeout that tokenising in another job would exceed; a lock has none."""
    monkeypatch.setattr(cache, "_WAIT_FOR_OTHER_JOB_S", 0.05)
    folder = tmp_path / "cache"
    folder.mkdir()
    path = token_file_path(find_local(str(file), "text"), byte_tokenizer, folder)
    passed = threading.Event()
    other_job = filelock.FileLock(f"{path}.lock")
    other_job.acquire()
    with ThreadPoolExecutor(1) as pool:
        documents = find_local(str(file), "text")
        job = pool.submit(open_or_build, documents, byte_tokenizer, folder, build=True, barrier=passed.set)
        assert passed.wait(30)
        assert not job.done()
        other_job.release()
        assert job.result().num_documents == 2


def test_token_files_are_readable_for_others(file: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        assert build(file, byte_tokenizer, tmp_path / "cache").path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)
