"""From a TOML file and the command line to a JobConfig, and back to TOML.

Order: the defaults, the file over them, the command line over both. All that is wrong with the names and the types is
told in one error.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tomli
import tyro

from torchtitan.config.arguments import read_arguments
from torchtitan.config.job import OPTIONS, SECTIONS, JobConfig, value_of
from torchtitan.config.legacy import RENAMED, Adapted, adapt
from torchtitan.config.validate import ineffective
from torchtitan.errors import ConfigError, nearest, option_error

_FLAGS = frozenset(option for option, kind in OPTIONS.items() if kind is bool)
_CONFIG_FILE = "job.config_file"
_HELP = """Train a language model, or prove a layout with the same options (python -m torchtitan.verify: one step under
the layout against one process; exit code 0 proven, 1 not). Options come from the TOML file given by
--job.config_file=FILE and from the command line, which wins. Write --training.steps=10 or --training.steps 10;
underscores and hyphens are alike; an option that is True or False is also given bare (--debug.deterministic) or with
no_ (--debug.no_deterministic)."""


@dataclass
class _Layer:
    """Values that one source gives, by key: a file's are typed, the command line's are texts."""

    source: str  # path of the file; empty: the command line
    values: dict[str, Any]

    def line(self, key: str, problem: str) -> str:
        """Return the problem with one of the values as a line of the error."""
        if self.source:
            return f"{self.source}: {key} = {_toml_value(self.values[key])}: {problem}"
        return f"--{key}={self.values[key]}: {problem}"


def load_config(argv: Sequence[str]) -> tuple[JobConfig, tuple[str, ...]]:
    """Return the configuration that `argv` asks for, and notes on given values that have no effect, for the log.

    Prints the help and raises SystemExit(0) for --help or -h.

    Raises:
        ConfigError: an unreadable file, or names and values that are not known; all of them in one message.
    """
    if {"--help", "-h"} & set(argv):
        _parse(["--help"], JobConfig())
    arguments = read_arguments(argv, _FLAGS, OPTIONS.keys() - _FLAGS)
    problems = list(arguments.problems)
    notes: list[str] = []
    path = arguments.texts.get(_CONFIG_FILE, "")
    file, line = _Layer(path, _read_toml(path)), _Layer("", dict(arguments.texts))
    for layer in (file, line):
        problems += _rename(layer, notes)
    for key in file.values.keys() & line.values.keys():
        del file.values[key]
    adapted = adapt(file.values | {key: _literal(text) for key, text in line.values.items()}, OPTIONS)
    for layer in (file, line):
        problems += _apply(adapted, layer)
        problems += _drop_unknown(layer)
    problems += _check_file_types(file)
    problems += _check_texts(line)
    if problems:
        raise _error(problems)
    config = _parse(_words(line.values), _with_values(JobConfig(), file.values))
    return config, (*notes, *adapted.notes, *ineffective(config))


def _error(problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  ".join([f"{len(problems)} options cannot be used:", *problems]))


def _parse(args: Sequence[str], default: JobConfig) -> JobConfig:
    return tyro.cli(
        JobConfig,
        prog="python -m torchtitan.train",
        description=_HELP,
        args=args,
        default=default,
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )


def _words(texts: Mapping[str, str]) -> list[str]:
    return [f"--{key}={text}" for key, text in texts.items()]


def _read_toml(path: str) -> dict[str, Any]:
    """Return the values of the file by dotted key; of no file, none."""
    if not path:
        return {}
    rule, remedy = "it must be a TOML file in UTF-8", "correct the path or the file"
    try:
        table = tomli.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise option_error(_CONFIG_FILE, path, f"cannot be read: {error.strerror}", rule, remedy) from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise option_error(_CONFIG_FILE, path, f"not valid: {error}", rule, remedy) from None
    values = dict(_flatten(table))
    if _CONFIG_FILE in values:
        fact, rule = f"it holds {_CONFIG_FILE}", "a file cannot name another one"
        raise option_error(_CONFIG_FILE, path, fact, rule, "remove the key")
    return values


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and name not in OPTIONS:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _rename(layer: _Layer, notes: list[str]) -> Iterator[str]:
    """Move values to the keys of this project; yields a problem for a value that is given under both."""
    for old, new in RENAMED.items():
        if old not in layer.values:
            continue
        if new in layer.values:
            yield layer.line(old, f"{new} is given too, and is the same option; keep {new} only")
        else:
            layer.values[new] = layer.values[old]
            notes.append(f"{old} is named {new} here")
        del layer.values[old]


def _literal(text: str) -> Any:
    """Return the value that a text of the command line would have in a file."""
    words = {"true": True, "false": False, "none": ""}
    if text.casefold() in words:
        return words[text.casefold()]
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _apply(adapted: Adapted, layer: _Layer) -> Iterator[str]:
    """Take out of the layer what was dropped, put in what was replaced; yields a problem per refused value."""
    for key in list(layer.values):
        if key in adapted.refused:
            yield layer.line(key, adapted.refused[key])
        if key in adapted.refused or key in adapted.dropped:
            del layer.values[key]
        elif key in adapted.replaced:
            layer.values[key] = adapted.replaced[key]


def _drop_unknown(layer: _Layer) -> Iterator[str]:
    for key in [key for key in layer.values if key not in OPTIONS]:
        yield layer.line(key, _unknown(key))
        del layer.values[key]


def _unknown(key: str) -> str:
    if key in SECTIONS:
        return f"this is a section, written [{key}]"
    section, _, name = key.rpartition(".")
    leaves = {option.partition(".")[2] for option in OPTIONS}
    close = {name} if name in leaves else set(get_close_matches(name, leaves, cutoff=0.7))
    similar = [option for option in OPTIONS if option.partition(".")[2] in close]
    known = [option for option in similar if option.startswith(f"{section}.")] or similar
    hint = f"; did you mean {', '.join(known)}?" if known else nearest(key, OPTIONS)
    return f"unknown option{hint or '; --help lists all options'}"


def _check_file_types(file: _Layer) -> Iterator[str]:
    for key, value in file.values.items():
        if not _fits(value, OPTIONS[key]):
            yield file.line(key, _rule(key))


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (float, float | None):
        return type(value) in (int, float)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    return type(value) is kind  # exactly: a bool is an int to isinstance


def _rule(key: str) -> str:
    """Return what values the option allows."""
    kind = OPTIONS[key]
    if get_origin(kind) is Literal:
        return f"it must be one of {', '.join(get_args(kind))}"
    if kind == int | Literal["auto"]:
        return "it must be a whole number or auto"
    rules = {bool: "true or false", int: "a whole number", str: "a text", float: "a number", float | None: "a number"}
    return f"it must be {rules[kind]}"


def _check_texts(line: _Layer) -> Iterator[str]:
    """Yield a problem for each text that tyro refuses; its own report is a box that names only the first."""
    if _is_parsed(line.values):
        return
    for key, text in line.values.items():
        if not _is_parsed({key: text}):
            yield line.line(key, _rule(key))


def _is_parsed(texts: Mapping[str, str]) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _parse(_words(texts), JobConfig())
    except SystemExit:
        return False
    return True


def _with_values(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    for key, value in values.items():
        section, name = key.split(".")
        typed = float(value) if OPTIONS[key] in (float, float | None) else value
        config = replace(config, **{section: replace(value_of(config, section), **{name: typed})})
    return config


def to_toml(config: JobConfig) -> str:
    """Return the configuration as a TOML file that gives it again.

    Left out are job.config_file, which this file takes the place of, job.print_config, which would keep it from
    running, and options that are None, which TOML cannot say and which are None by default.
    """
    lines = []
    for section, cls in SECTIONS.items():
        lines.append(f"[{section}]")
        for name in (field.name for field in fields(cls)):
            value = value_of(config, f"{section}.{name}")
            if f"{section}.{name}" not in (_CONFIG_FILE, "job.print_config") and value is not None:
                lines.append(f"{name} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which only TOML refuses.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
