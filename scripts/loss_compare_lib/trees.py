"""The code of each side, in a folder of its own; the user's tree is only read."""

import contextlib
import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .console import CompareError, UsageError

WORKING_TREE = "."
# Set in git's hooks, where they would point git at the user's index.
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command, which a Ctrl-C at the terminal does not reach."""
    environment = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    command = ["git", "-c", f"core.hooksPath={os.devnull}", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, stdin=subprocess.DEVNULL, start_new_session=True
    )
    if result.returncode:
        raise CompareError(f"git {' '.join(arguments)}: {os.fsdecode(result.stderr).strip()}")
    return os.fsdecode(result.stdout).rstrip("\n")


def find_repository(folder: Path) -> Path:
    """Return the top of the working tree that holds the folder."""
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel"))
    except CompareError as error:
        raise UsageError(f"{folder} is not inside a git working tree: {error}") from None
    except FileNotFoundError:
        raise UsageError("git was not found; revisions and the files of the working tree come from it") from None


def resolve(repo: Path, revision: str) -> str:
    """Return the commit that a revision names now; raises a UsageError that lists similar names, if there is none."""
    if revision == WORKING_TREE:
        return revision
    try:
        return git(repo, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except CompareError:
        names = git(repo, "for-each-ref", "--format=%(refname:short)", "--sort=-committerdate").splitlines()
        listed = ", ".join(difflib.get_close_matches(revision, names) or names[:5]) or "none yet"
        shallow = git(repo, "rev-parse", "--is-shallow-repository") == "true"
        hint = "; this clone is shallow, git fetch --unshallow brings older ones" if shallow else ""
        raise UsageError(f"{revision!r} is no revision of {repo}; branches and tags: {listed}{hint}") from None


@contextlib.contextmanager
def checkout(repo: Path, revision: str, folder: Path) -> Iterator[Path]:
    """Have a revision's code in a folder that does not exist yet: a worktree, or a copy of the working tree."""
    if revision == WORKING_TREE:
        _copy_working_tree(repo, folder)
        yield folder
        return
    try:
        git(repo, "worktree", "add", "--detach", str(folder), revision)
        yield folder
    finally:
        _remove_worktree(repo, folder)


def _remove_worktree(repo: Path, folder: Path) -> None:
    if str(folder) in git(repo, "worktree", "list", "--porcelain"):
        git(repo, "worktree", "remove", "--force", "--force", str(folder))


def _copy_working_tree(repo: Path, folder: Path) -> None:
    """Copy the tracked and the not ignored files."""
    listed = git(repo, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        source, target = repo / name, folder / name
        if source.is_symlink() or source.is_file():  # not a file that was deleted, nor a submodule
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
