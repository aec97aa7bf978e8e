"""The documents in one file of the user's, with errors that name the file and the line."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from torchtitan.errors import DataError

if TYPE_CHECKING:
    import datasets

_KINDS = (".jsonl", ".json", ".parquet", ".txt")
SUFFIXES = (*_KINDS, *(f"{kind}.gz" for kind in _KINDS if kind != ".parquet"))
_ROWS_AT_ONCE = 1024
_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One text, and how many bytes of the files were read for it."""

    text: str  # empty: nothing to learn from, skipped by the reader
    num_bytes: int


def read_file(file: Path, text_field: str) -> Iterator[Document]:
    """Yield the documents of a JSON, JSONL, Parquet or text file; all but Parquet may be gzipped.

    Raises:
        DataError: the file cannot be read, is not UTF-8, is not what its name says, or lacks the field.
    """
    kind = Path(file.name.removesuffix(".gz")).suffix
    read = {".txt": _read_text, ".jsonl": _read_lines, ".json": _read_json, ".parquet": _read_parquet}[kind]
    try:
        yield from read(file, text_field)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


@contextmanager
def _open(file: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Give the file as it lies on disk, for its position, and as it is read."""
    with file.open("rb") as raw:
        if file.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield raw, cast(IO[bytes], stream)
        else:
            yield raw, raw


def _read_text(file: Path, text_field: str) -> Iterator[Document]:
    with _open(file) as (raw, stream):
        yield Document(_decode(stream.read(), file, first_line=1), raw.tell())


def _read_lines(file: Path, text_field: str) -> Iterator[Document]:
    position = 0
    with _open(file) as (raw, stream):
        for number, line in enumerate(stream, 1):
            if line.strip():
                text = _field(_parse(line.rstrip(), file, number), text_field, f"{file}, line {number}")
                before, position = position, raw.tell()
                yield Document(text, position - before)


def _read_json(file: Path, text_field: str) -> Iterator[Document]:
    """Yield the texts of an array of objects, or of one object per line."""
    with _open(file) as (_, stream):
        is_array = stream.read(4096).removeprefix(_BOM).lstrip()[:1] == b"["
    if not is_array:
        yield from _read_lines(file, text_field)
        return
    with _open(file) as (raw, stream):
        content, num_bytes = stream.read(), raw.tell()
    rows = _parse(content, file, 1)
    for number, row in enumerate(rows, 1):
        yield Document(_field(row, text_field, f"{file}, entry {number}"), num_bytes // len(rows))


def _read_parquet(file: Path, text_field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    size = file.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_fields(text_field, table.schema_arrow.names, str(file))
            row, num_bytes = 0, size // max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[text_field]):
                for text in _column_texts(batch.column(0), file, row):
                    row += 1
                    yield Document(_text(text, text_field, f"{file}, row {row}"), num_bytes)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a Parquet file that pyarrow can read: {error}") from error


def _column_texts(column: Any, file: Path, row: int) -> Iterator[Any]:
    for scalar in column:
        row += 1
        try:
            yield scalar.as_py()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}, row {row}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_saved_dataset(folder: Path, text_field: str) -> Iterator[Document]:
    """Yield the documents of a folder that `datasets` wrote; of several splits, those of "train".

    Raises:
        DataError: `datasets` cannot load it, it has no split "train", or its rows lack the field.
    """
    rows = _load_saved_dataset(folder)
    _check_fields(text_field, rows.column_names, str(folder))
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*.arrow")) // max(1, len(rows))
    row = 0
    for batch in rows.select_columns([text_field]).iter(batch_size=_ROWS_AT_ONCE):
        for text in cast(dict[str, list[Any]], batch)[text_field]:
            row += 1
            yield Document(_text(text, text_field, f"{folder}, row {row}"), num_bytes)


def _load_saved_dataset(folder: Path) -> "datasets.Dataset":
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes of pyarrow, json or the file system
        raise DataError(f"{folder}: not a folder that datasets can load: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if "train" not in loaded:
        splits = ", ".join(loaded)
        raise DataError(f"{folder}: no split 'train'; its splits are: {splits}; give the folder of one of them")
    return loaded["train"]


def _parse(content: bytes, file: Path, first_line: int) -> Any:
    text = _decode(content, file, first_line)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{file}, line {line}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}, line {first_line}: not valid JSON: {error}") from None


def _decode(content: bytes, file: Path, first_line: int) -> str:
    content = content.removeprefix(_BOM) if first_line == 1 else content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        bad = content[error.start]
        raise DataError(
            f"{file}, line {line}: not UTF-8: byte 0x{bad:02x} ({error.reason}); convert the file to UTF-8"
        ) from None


def _field(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {json.dumps(row)[:60]}")
    _check_fields(text_field, list(row), where)
    return _text(row[text_field], text_field, where)


def _check_fields(text_field: str, fields: list[str], where: str) -> None:
    if text_field not in fields:
        raise DataError(
            f"{where}: no field {text_field!r}; its fields are: {', '.join(fields) or 'none'}; "
            "choose one by --training.dataset_text_field"
        )


def _text(value: Any, text_field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {text_field!r} is not text but {type(value).__name__}")
    return value
