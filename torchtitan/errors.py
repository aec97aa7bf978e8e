"""Errors that a user can act on; anything else that escapes is a bug and keeps its traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class TitanError(Exception):
    """A failure that is shown in one line, without a traceback."""

    exit_code = 1


class ConfigError(TitanError):
    """The user asked for something that cannot be done; raised before anything is allocated."""

    exit_code = 2


class DataError(ConfigError):
    """A file or data set of the user's is unusable; the message names the file and the line."""


class CheckpointError(TitanError):
    """A checkpoint is absent, incomplete, or does not fit the model."""


class NonFiniteError(TitanError):
    """The loss or a gradient became NaN or infinite; the parameters were not updated."""


def option_error(flag: str, value: object, fact: str, rule: str, remedy: str) -> ConfigError:
    """Return a ConfigError in the one form that all option errors have."""
    return ConfigError(f"--{flag}={value}: {fact}; {rule}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean a, b?' for the known names nearest to `name`, or the empty string."""
    matches = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(matches)}?" if matches else ""
