"""Which documents a run trains on: the standard library's source, or the user's files."""

import glob
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan.data.files import SUFFIXES, Document, read_file, read_saved_dataset
from torchtitan.errors import ConfigError, DataError, option_error

logger = logging.getLogger(__name__)

STDLIB, LOCAL, HUB = "python_stdlib", "local", "c4"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Documents(Protocol):
    """Documents that are tokenised once into a cache."""

    name: str  # for the log and the cache's file name
    text_field: str
    files: list[Path]  # all that decide about the documents, in a fixed order

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents, in an order that only depends on the files."""


def find_documents(dataset: str, dataset_path: str, text_field: str) -> Documents:
    """Return the documents of `training.dataset` and `training.dataset_path`; a path means local files.

    Raises:
        ConfigError: there is no data of that name or path.
        DataError: there is nothing to read.
    """
    if dataset_path:
        return find_local(dataset_path, text_field)
    if dataset == STDLIB:
        return find_stdlib(Path(sysconfig.get_path("stdlib")))
    known = f"known: {STDLIB}, {HUB}, and {LOCAL} with --training.dataset_path"
    raise option_error("training.dataset", dataset, "it names no documents", known, "choose one")


@dataclass
class StdlibDocuments:
    """One document per source file; empty and undecodable files are skipped and counted."""

    files: list[Path]
    name: str = STDLIB
    text_field: str = ""

    def __iter__(self) -> Iterator[Document]:
        skipped = 0
        for file in self.files:
            content = _read(file)
            text = _decode(content)
            if text:
                yield Document(text, len(content))
            skipped += not text
        if skipped:
            logger.info("Data: skipped %d of %d source files, empty or not UTF-8", skipped, len(self.files))


@dataclass
class LocalDocuments:
    """The documents of JSON, JSONL, Parquet and text files, file by file."""

    files: list[Path]
    text_field: str
    name: str

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            yield from read_file(file, self.text_field)


@dataclass
class SavedDataset:
    """A folder that `datasets` wrote with save_to_disk."""

    folder: Path
    files: list[Path]
    text_field: str
    name: str

    def __iter__(self) -> Iterator[Document]:
        yield from read_saved_dataset(self.folder, self.text_field)


def find_stdlib(root: Path) -> StdlibDocuments:
    """Return the source files below the folder of a standard library, without installed packages and tests.

    Raises:
        DataError: there is none, as with a Python whose library is zipped.
    """
    files = [file for file in _walk(root, _NOT_STDLIB) if file.suffix == ".py"]
    if not files:
        raise DataError(
            f"{root}: no source of Python's standard library here; give data of your own by --training.dataset_path"
        )
    return StdlibDocuments(files)


def find_local(path: str, text_field: str) -> Documents:
    """Return the documents of a file, a folder, a saved `datasets` folder, or a glob."""
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        return _find_in_folder(place, path, text_field)
    if place.is_file():
        return LocalDocuments([_check_suffix(place, path)], text_field, place.name)
    files = [Path(found) for found in sorted(glob.glob(str(place), recursive=True)) if Path(found).is_file()]
    if not files:
        raise option_error(
            "training.dataset_path", path, "no file matches", "it is a file, a folder or a glob", "check the path"
        )
    return LocalDocuments([_check_suffix(file, path) for file in files], text_field, "glob")


def _find_in_folder(folder: Path, path: str, text_field: str) -> Documents:
    everything = _walk(folder, set())
    names = {file.name for file in everything if file.parent == folder}
    if names >= {"state.json", "dataset_info.json"} or "dataset_dict.json" in names:
        return SavedDataset(folder, everything, text_field, folder.name)
    files = [file for file in everything if file.name.endswith(SUFFIXES)]
    if not files:
        fact = f"none of the {len(everything)} files below this folder is of a known kind"
        raise _path_error(path, fact)
    return LocalDocuments(files, text_field, folder.name)


def _check_suffix(file: Path, path: str) -> Path:
    if not file.name.endswith(SUFFIXES):
        raise _path_error(path, f"{file.name} is of no known kind")
    return file


def _path_error(path: str, fact: str) -> ConfigError:
    known = f"known: {', '.join(SUFFIXES)}"
    return option_error("training.dataset_path", path, fact, known, "rename or convert what you mean to train on")


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """Return the files below `root`, hidden ones and folders of the names in `left_out` aside, by relative path."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return ""
