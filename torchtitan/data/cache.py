"""Token files: documents tokenised once, then mapped into memory by every rank.

One file, written aside and renamed, so it is whole or absent:
tokens (uint16 or uint32), padding to 8 bytes, the document offsets (int64), a description (JSON), its length
(8 bytes), and a magic number that a truncated file does not end with.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import filelock
import numpy as np

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.data.documents import Documents
from torchtitan.data.files import Document
from torchtitan.data.progress import Progress
from torchtitan.errors import DataError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAGIC = b"TITANTOK"
_CHARS_AT_ONCE = 8_000_000
_WAIT_FOR_OTHER_JOB_S = 60.0


@dataclass(frozen=True)
class TokenFile:
    """All documents, each BOS + text + EOS, one after the other."""

    path: Path
    tokens: np.ndarray  # [tokens], mapped
    offsets: np.ndarray  # int64 [documents + 1]
    fingerprint: str  # of the tokens, BOS and EOS among them: the same wherever the same documents were tokenised alike

    def __reduce__(self) -> tuple[Callable[[Path], "TokenFile | None"], tuple[Path]]:
        return read_token_file, (self.path,)  # a worker process maps the file itself

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.offsets) - 1


def default_cache_folder() -> Path:
    """Return $TORCHTITAN_CACHE, else the user's cache folder for this project."""
    if folder := os.environ.get("TORCHTITAN_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "torchtitan"


def open_or_build(
    documents: Documents, tokenizer: Tokenizer, folder: Path, *, build: bool, barrier: Callable[[], None]
) -> TokenFile:
    """Return the token file of `documents`; of the ranks that share `folder` the one with `build` makes it if need be.

    All ranks pass `barrier` once. The building rank holds a lock by then, which the others wait for however long
    tokenising takes, and which the system lets go of should the building rank die.

    Raises:
        DataError: on every rank alike: the documents or the folder are unusable.
    """
    path = token_file_path(documents, tokenizer, folder)
    if build:
        return _open_as_builder(path, documents, tokenizer, barrier)
    barrier()
    return read_token_file(path) or _open_after_builder(path)


def token_file_path(documents: Documents, tokenizer: Tokenizer, folder: Path) -> Path:
    """Return the place of the token file: it moves when the tokenizer, a file or the field changes."""
    try:
        facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in documents.files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    key = json.dumps([FORMAT_VERSION, tokenizer.fingerprint, documents.name, documents.text_field, facts])
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", documents.name)[:64]
    return folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.tokens"


def read_token_file(path: Path) -> TokenFile | None:
    """Return the token file there, mapped, or None where there is none or only a damaged one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            about = _read_description(stream, size)
    except OSError:
        return None
    if about is None:
        logger.warning("Data: %s is damaged (%d bytes) and is not used", path, size)
        return None
    tokens = np.memmap(path, about["dtype"], "r", shape=(about["num_tokens"],))
    shape = (about["num_documents"] + 1,)
    offsets = np.memmap(path, "<i8", "r", offset=_padded(tokens.nbytes), shape=shape)
    return TokenFile(path, tokens, offsets, about["fingerprint"])


def _read_description(stream: IO[bytes], size: int) -> dict[str, Any] | None:
    tail = 8 + len(_MAGIC)
    if size < tail:
        return None
    stream.seek(size - tail)
    length, magic = int.from_bytes(stream.read(8), "little"), stream.read()
    if magic != _MAGIC or length > size - tail:
        return None
    stream.seek(size - tail - length)
    about = json.loads(stream.read(length))
    token_bytes = about["num_tokens"] * np.dtype(about["dtype"]).itemsize
    whole = _padded(token_bytes) + 8 * (about["num_documents"] + 1) + length + tail
    return about if whole == size else None


def _open_as_builder(path: Path, documents: Documents, tokenizer: Tokenizer, barrier: Callable[[], None]) -> TokenFile:
    found = read_token_file(path)
    lock = filelock.FileLock(_beside(path, "lock"))
    try:
        try:
            if found is None:
                _try_to_lock(lock, path.parent)
        finally:
            barrier()
        if found is not None:
            logger.info("Data: reusing the tokens in %s", path)
            return found
        with lock:  # waits here where another job tokenises the same documents
            return read_token_file(path) or _build_or_report(path, documents, tokenizer)
    finally:
        lock.release(force=True)


def _try_to_lock(lock: filelock.BaseFileLock, folder: Path) -> None:
    """Take the lock, unless another job keeps it so long that this job's ranks would give up waiting."""
    with _writing_in(folder), suppress(filelock.Timeout):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_WAIT_FOR_OTHER_JOB_S)


def _open_after_builder(path: Path) -> TokenFile:
    with _writing_in(path.parent), filelock.FileLock(_beside(path, "lock")):
        found = read_token_file(path)
    if found is not None:
        return found
    error_file = _beside(path, "error")
    if error_file.is_file():
        raise DataError(error_file.read_text(encoding="utf-8"))
    raise DataError(f"{path}: the rank that should have written it did not; its own message says why")


def _build_or_report(path: Path, documents: Documents, tokenizer: Tokenizer) -> TokenFile:
    """Write the token file; a failure is written beside it for the ranks that wait."""
    error_file = _beside(path, "error")
    try:
        with _writing_in(path.parent):
            error_file.unlink(missing_ok=True)
            return _build(path, documents, tokenizer)
    except Exception as error:
        message = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            error_file.write_text(message, encoding="utf-8")
        raise


def _build(path: Path, documents: Documents, tokenizer: Tokenizer) -> TokenFile:
    for left_by_killed in path.parent.glob(f"{path.name}.*.tmp"):  # the lock is ours: nobody writes them
        left_by_killed.unlink()
    temporary = _beside(path, f"{os.getpid()}-{secrets.token_hex(4)}.tmp")
    start = time.monotonic()
    try:
        with temporary.open("xb") as stream:
            num_documents, num_tokens = _write(stream, documents, tokenizer)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    message = "Data: tokenised %s, %d documents, %d tokens, in %.1f s, into %s"
    logger.info(message, documents.name, num_documents, num_tokens, time.monotonic() - start, path)
    built = read_token_file(path)
    assert built is not None, path
    return built


def _write(stream: IO[bytes], documents: Documents, tokenizer: Tokenizer) -> tuple[int, int]:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    digest = hashlib.sha256()
    lengths = []
    for ids in _tokenise(documents, tokenizer):  # of one document
        part = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]]).astype(dtype)
        lengths.append(len(part))
        digest.update(part.data)
        stream.write(part.data)
    if not lengths:
        raise DataError(f"{documents.name}: {len(documents.files)} files were read and hold no document with text")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    num_tokens = int(offsets[-1])
    token_bytes = num_tokens * np.dtype(dtype).itemsize
    about = {
        "dtype": dtype, "num_tokens": num_tokens, "num_documents": len(lengths), "fingerprint": digest.hexdigest()
    }  # fmt: skip
    description = json.dumps(about).encode()
    stream.write(bytes(_padded(token_bytes) - token_bytes) + offsets.tobytes() + description)
    stream.write(len(description).to_bytes(8, "little") + _MAGIC)
    return len(lengths), num_tokens


def _tokenise(documents: Documents, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    num_empty = 0
    total = sum(file.stat().st_size for file in documents.files)
    with closing(Progress(documents.name, total)) as progress:
        for batch in _batches(documents):
            texts = [document.text for document in batch if document.text]
            num_empty += len(batch) - len(texts)
            yield from tokenizer.encode_batch(texts)
            progress.add(sum(document.num_bytes for document in batch))
    if num_empty:
        logger.info("Data: skipped %d documents of %s without text", num_empty, documents.name)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= _CHARS_AT_ONCE:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


@contextmanager
def _writing_in(folder: Path) -> Iterator[None]:
    """Turn a failure to write or to lock into an error that names the way out."""
    try:
        yield
    except filelock.Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(
            f"{folder}: the cache of tokens cannot be written here: {reason}; set the environment variable "
            "TORCHTITAN_CACHE to a folder that can be written and has room"
        ) from error
