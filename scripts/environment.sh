# Sourced by run_train.sh and run_tests.sh: finds or makes the Python environment, and puts this tree first on its path.
#
#   use_environment train|test     sets $PYTHON to an interpreter that has what is needed
#
# PYTHON=, an active virtual environment or conda environment is used as it is and never changed. Otherwise .venv beside
# this tree is made once; a later start looks at a stamp and does not touch the network.

_say() { printf '[titan] %s\n' "$*" >&2; }
_die() { _say "$*"; exit 2; }

_check_environment() { # interpreter, kind
  "$1" - "$2" <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec

needed = ["torch", "torchdata", "datasets", "tiktoken", "tokenizers", "tyro", "tomli", "tqdm", "numpy"]
needed += ["pytest", "hypothesis", "transformers", "matplotlib", "ruff", "mypy"] if sys.argv[1] == "test" else []
missing = [name for name in needed if find_spec(name) is None]
if "torch" not in missing and not (2, 11) <= tuple(int(part) for part in version("torch").split(".")[:2]) <= (2, 14):
    missing.append(f"torch 2.11 to 2.14 (it has {version('torch')})")
print(" ".join(missing))
sys.exit(bool(missing) or not (3, 10) <= sys.version_info[:2] <= (3, 13))
PY
}

_base_python() {
  local candidate
  for candidate in python3 python3.11 python3.12 python3.13 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

_make_venv() { # base interpreter, folder
  rm -rf "$2"
  if "$1" -c 'import ensurepip' 2>/dev/null && "$1" -m venv "$2"; then return; fi
  # Debian's python3 comes without ensurepip: pip of the base interpreter puts a pip into the environment.
  rm -rf "$2"
  "$1" -m venv --without-pip "$2" && "$1" -m pip --python "$2/bin/python" install -q pip ||
    _die "could not make $2 with pip in it; install python3-venv, or use an environment of your own by PYTHON="
}

_install() { # root, kind, venv
  local constraints="$1/scripts/constraints.txt" extra=""
  [ "$2" = test ] && extra="[test]"
  _say "installing into $3 (once)"
  # torch first and alone: with an unpinned torch, pip may choose a build of several GB that the machine has no use for.
  "$3/bin/python" -m pip install -q "$(sed -n '/^torch==/p' "$constraints")" &&
    "$3/bin/python" -m pip install -q -c "$constraints" -e "$1$extra" ||
    _die "installation failed (see above); start again when the cause is gone, or use PYTHON="
}

_own_venv() { # root, kind
  local venv="$1/.venv" stamp sum base
  sum=$(cat "$1/pyproject.toml" "$1/scripts/constraints.txt" | cksum)
  if command -v flock >/dev/null; then # two starts at once install once
    exec 9>"$1/.venv.lock"
    flock 9
  fi
  stamp="$venv/.installed-$2"
  [ "$2" = train ] && [ -f "$venv/.installed-test" ] && stamp="$venv/.installed-test"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
      base=$(_base_python) ||
        _die "no Python from 3.10 to 3.13 was found; install one, or name it by PYTHON=/path/to/python"
      _make_venv "$base" "$venv"
    fi
    rm -f "$venv"/.installed-*
    _install "$1" "$2" "$venv"
    printf '%s\n' "$sum" >"$venv/.installed-$2"
  fi
  exec 9>&-
  PYTHON="$venv/bin/python"
}

use_environment() { # kind
  local root missing active=""
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  [ -n "${CONDA_PREFIX:-}" ] && active="$CONDA_PREFIX/bin/python"
  [ -n "${VIRTUAL_ENV:-}" ] && active="$VIRTUAL_ENV/bin/python"
  PYTHON="${PYTHON:-$active}"
  if [ -z "$PYTHON" ]; then
    _own_venv "$root" "$1"
  elif ! command -v "$PYTHON" >/dev/null; then
    _die "PYTHON=$PYTHON: there is no such program; name an interpreter from 3.10 to 3.13, or leave it unset to have .venv made"
  elif ! missing=$(_check_environment "$PYTHON" "$1"); then
    local extra=""
    [ "$1" = test ] && extra="[test]"
    _die "$PYTHON is no Python from 3.10 to 3.13 that can run this; it lacks: ${missing:-a fitting version}. Install by" \
      "'$PYTHON -m pip install -c $root/scripts/constraints.txt -e $root$extra', or leave the environment to have .venv made"
  fi
  export PYTHON PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}
