#!/usr/bin/env bash
# Run the tests: ./scripts/run_tests.sh [--all] [options of pytest]
#
# --all adds the tests marked slow. Everything else goes to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment test
cd "$(dirname "${BASH_SOURCE[0]}")/.."
marks=(-m "not slow")
if [ "${1:-}" = --all ]; then
  marks=()
  shift
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # most tests start several ranks
exec "$PYTHON" -m pytest "${marks[@]}" "$@"
