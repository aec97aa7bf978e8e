"""What is read of the standard library and of a user's files, and how a bad file is named."""

import gzip
import json
from pathlib import Path

import pytest

from torchtitan.data.documents import find_documents, find_local, find_stdlib
from torchtitan.errors import ConfigError, DataError

LINES = b'{"text": "one"}\n\n{"text": "two\\n", "more": 1}\r\n{"text": null}\n'
TEXTS = ["one", "two\n", ""]


def texts(path: Path | str, text_field: str = "text") -> list[str]:
    """Return the texts of all documents at a path."""
    return [document.text for document in find_local(str(path), text_field)]


def write(file: Path, content: bytes) -> Path:
    """Write a file, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_the_running_pythons_library_is_megabytes_without_tests_and_packages() -> None:
    documents = find_documents("python_stdlib", "", "text")
    assert sum(file.stat().st_size for file in documents.files) > 5e6
    assert not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & {
        part for file in documents.files for part in file.parts[-3:-1]
    }


def test_stdlib_order_and_what_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [
        "b.py",
        "a/z.py",
        "a.py",
        "site-packages/x.py",
        "a/tests/t.py",
        "lib2/idle_test/i.py",
        "test/t.py",
        "n.txt",
    ]
    for name in names:
        write(tmp_path / name, name.encode())
    write(tmp_path / "empty.py", b"")
    write(tmp_path / "latin.py", b"# \xe9")
    with caplog.at_level("INFO"):
        found = [document.text for document in find_stdlib(tmp_path)]
    assert found == ["a.py", "a/z.py", "b.py"]
    assert "skipped 2 of 5 source files, empty or not UTF-8" in caplog.text


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no source of Python's standard library.*--training.dataset_path"):
        find_stdlib(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, gzip.compress(LINES) if name.endswith(".gz") else LINES)
    assert texts(file) == TEXTS
    read = sum(document.num_bytes for document in find_local(str(file), "text"))
    assert read == file.stat().st_size, "the progress bar ends at 100 %"


def test_json_array(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", b'\xef\xbb\xbf\n [{"text": "one"}, {"text": "two"}]')
    assert texts(file) == ["one", "two"]


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "\ufeffzwei\r\nZeilen\n".encode())
    write(tmp_path / "a/c.txt.gz", gzip.compress(b"one"))
    write(tmp_path / ".hidden/d.txt", b"hidden")
    write(tmp_path / "README.md", b"other")
    assert texts(tmp_path) == ["one", "zwei\r\nZeilen\n"]
    assert texts(tmp_path / "*.txt") == ["zwei\r\nZeilen\n"]
    assert texts(tmp_path / "**" / "*.txt*") == ["one", "zwei\r\nZeilen\n"]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": [1, 2, 3], "body": ["one", None, "three"], "bad": [b"a", b"b", b"\xff"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path, "body") == ["one", "", "three"]
    with pytest.raises(DataError, match=r"a.parquet: no field 'text'; its fields are: id, body, bad; .*text_field"):
        texts(tmp_path)
    with pytest.raises(DataError, match=r"a.parquet, row 1: the field 'id' is not text but int"):
        texts(tmp_path, "id")
    strings = pyarrow.array([b"a", b"b", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 3: not UTF-8: invalid start byte"):
        texts(tmp_path)
    write(tmp_path / "a.parquet", b"no parquet at all")
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file"):
        texts(tmp_path)


def test_saved_datasets(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", None, "two"], "id": [1, 2, 3]})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(str(tmp_path / "other"))
    assert texts(tmp_path / "plain") == texts(tmp_path / "splits") == ["one", "", "two"]
    with pytest.raises(DataError, match="no split 'train'; its splits are: a, b; give the folder of one of them"):
        texts(tmp_path / "other")
    assert texts(tmp_path / "other" / "b") == ["one", "", "two"]
    with pytest.raises(DataError, match="plain: no field 'body'; its fields are: text, id"):
        texts(tmp_path / "plain", "body")
    write(tmp_path / "plain" / "state.json", b"{")
    with pytest.raises(DataError, match="plain: not a folder that datasets can load"):
        texts(tmp_path / "plain")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl, line 2: not UTF-8: byte 0xff"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": }\n',
            r"a.jsonl, line 3: not valid JSON: Expecting value \(column 10\)",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"body": "a", "id": 1}\n', "line 2: no field 'text'; its fields are: body, id; "),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: the field 'text' is not text but int"),
        ("a.jsonl", b'"text"\n', 'a.jsonl, line 1: expected a JSON object, found "text"'),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl.gz", b"not gzip", r"a.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 9)[:-9],
            r"a.jsonl.gz: cannot be read: Compressed file ended",
        ),
        ("a.json", b'[{"text": "a"},\n {"text": "b"},\n {"text"}]', "a.json, line 3: not valid JSON: Expecting ':'"),
        ("a.json", b'[{"text": "a"},\n {"body": "b"}]', "a.json, entry 2: no field 'text'; its fields are: body"),
        ("a.json", b'[{"text": "a"},\n {"text": "\xff"}]', "a.json, line 2: not UTF-8: byte 0xff"),
        ("a.txt", b"one\ntwo\n\xe9\n", "a.txt, line 3: not UTF-8: byte 0xe9"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        texts(write(tmp_path / name, content))


def test_bad_paths_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", b"")
    with pytest.raises(ConfigError, match=r"^--training.dataset_path=.*/no\*: no file matches"):
        texts(tmp_path / "no*")
    with pytest.raises(ConfigError, match=r"none of the 1 files below this folder is of a known kind; known: .jsonl, "):
        texts(tmp_path)
    with pytest.raises(ConfigError, match=r"a.csv is of no known kind; known: .jsonl"):
        texts(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match=r"a.csv is of no known kind"):
        texts(tmp_path / "a*")


def test_a_path_means_local_files_whatever_the_data_set(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps({"text": "mine"}).encode())
    assert [document.text for document in find_documents("python_stdlib", str(tmp_path), "text")] == ["mine"]
    with pytest.raises(
        ConfigError, match=r"^--training.dataset=c5: it names no documents; known: python_stdlib, c4, and"
    ):
        find_documents("c5", "", "text")


def test_brackets_in_a_file_name_are_no_glob(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a[1].txt", b"one")) == ["one"]
