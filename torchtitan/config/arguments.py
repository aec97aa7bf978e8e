"""The command line as names and texts: every spelling that people use becomes one."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_BOOLS = {"true": "True", "false": "False"}


@dataclass(frozen=True)
class Arguments:
    """What a command line says, by dotted name; of an option given twice the last counts."""

    texts: dict[str, str]
    problems: tuple[str, ...]


def read_arguments(argv: Sequence[str], flags: Collection[str], valued: Collection[str]) -> Arguments:
    """Return the options of `argv`: `--a.b=1`, `--a.b 1`, and for flags also `--a.b` and `--a.no_b`.

    Hyphens in a name count as underscores. `flags` and `valued` are the known options without and with a value. Of any
    other name, the next word is the value unless it is an option itself.
    """
    texts: dict[str, str] = {}
    problems: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        if not _is_utf8(word):
            problems.append(f"{word!a}: not UTF-8")
            continue
        if not word.startswith("--") or word == "--":
            problems.append(f"{word}: unexpected argument; every option starts with --")
            continue
        name, text = _split(word)
        positive = name.replace(".no_", ".")
        if name not in flags and positive in flags and text is None:
            texts[positive] = "False"
        elif text is None and (name in valued) and not _next_is_value(words):
            problems.append(f"--{name}: a value is missing; one that starts with -- is given as --{name}=VALUE")
        else:
            value = _take_value(words, name in flags) if text is None else text
            texts[name] = _BOOLS.get(value.casefold(), value) if name in flags else value
    return Arguments(texts, tuple(problems))


def _split(word: str) -> tuple[str, str | None]:
    name, equals, text = word[2:].partition("=")
    return name.replace("-", "_"), text if equals else None


def _next_is_value(words: deque[str]) -> bool:
    return bool(words) and not words[0].startswith("--")


def _take_value(words: deque[str], flag: bool) -> str:
    """Return the value at the front of `words`, or True where there is none."""
    if _next_is_value(words) and (not flag or words[0].casefold() in _BOOLS):
        return words.popleft()
    return "True"


def _is_utf8(word: str) -> bool:
    # Bytes of an argument that are not UTF-8 arrive as lone surrogates, which no file or log can take.
    return not any(0xD800 <= ord(letter) <= 0xDFFF for letter in word)
