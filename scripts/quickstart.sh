#!/usr/bin/env bash
# Serves a real model from a fresh clone: makes .venv, installs paxpage and its embedded model, starts the server.
#
#   ./scripts/quickstart.sh [flags of python -m paxpage.serve]
#
# Needs Python 3.12 or newer and nothing else. A second start installs nothing. The CPU serves unless told otherwise:
# PAXPAGE_EXTRAS=cuda13 (or cuda12) installs JAX for an NVIDIA GPU, and stays until .venv is removed.
set -euo pipefail
# shellcheck source=scripts/lib/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/venv.sh"

ensure_venv serve
hint_gpu
say "starting the server"
exec "$venv_python" -m paxpage.serve "$@"
