"""What people and scripts read."""


class CompareError(Exception):
    """The comparison cannot be made."""

    exit_code = 1


class UsageError(CompareError):
    """The command line asks for something that does not exist."""

    exit_code = 2


def say(text: str = "") -> None:
    """Print text with the prefix that scripts look for before each of its lines."""
    for line in text.splitlines() or [""]:
        print(f"[LOSS_COMPARE] {line}".rstrip(), flush=True)
