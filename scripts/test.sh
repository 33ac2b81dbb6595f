#!/usr/bin/env bash
# Runs what CI runs: format, lint, types, tests. With arguments only pytest, given these.
#
#   ./scripts/test.sh [arguments of pytest]
#
# Without arguments the tests run in two processes, a file's in one of them; PAXPAGE_TEST_PROCESSES changes how many.
#
# Needs Python 3.12 or newer and nothing else; makes .venv at the first run. PAXPAGE_TEST_GPU=1 adds the tests that need
# a GPU (with PAXPAGE_EXTRAS=cuda13).
set -euo pipefail
# shellcheck source=scripts/lib/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/venv.sh"

ensure_venv serve,test
ensure_cuda_compiler
cd "$root"
if [ $# -eq 0 ]; then
  say "checking format, lint and types"
  "$venv_python" -m ruff format --check .
  "$venv_python" -m ruff check .
  "$venv_python" -m mypy
  # tests/conftest.py has the slow files first; pytest-xdist would rather begin with those of many tests.
  set -- -n "${PAXPAGE_TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder
fi
exec "$venv_python" -m pytest "$@"
