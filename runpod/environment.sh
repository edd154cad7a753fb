#!/usr/bin/env bash
# Functions that create the Python environment in $venv. Only to be sourced by on_start.sh.
# It is in the container, because a network volume is slow with its 50,000 small files (dev/LOG.md).

# shellcheck disable=SC2154  # $repository is set by on_start.sh
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

set_up() {
  local code
  # Another version of the requirements gets its own folder, because a run may still use the environment.
  venv=$HOME/gpt2-venv-$(sha256sum "$repository/requirements.txt" | cut -c1-12)
  # One on_start.sh at a time.
  if ! { { exec 8>>"$temporary/environment.lock"; } 2>/dev/null && flock -w 1800 8; }; then say "continuing without a lock"; fi
  set_up_environment
  code=$?
  exec 8>&-
  return "$code"
}

# Print the version of the installed torch, which includes the CUDA version. Fail if torch is not installed. torch is
# not imported, because the import takes seconds.
torch_version() { "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

set_up_environment() {
  local torch
  [[ -e $venv/.ok ]] && return 0
  say "installing the Python environment $venv"
  rm -rf "$venv"
  python -m venv --system-site-packages "$venv" || return 1
  cp "$repository/requirements.txt" "$venv/requirements.txt" || return 1
  : >"$venv/constraints.txt"
  if torch=$(torch_version "$venv/bin/python"); then
    # Keep an installed torch, also outside the range of requirements.txt. The preflight then shows a note.
    echo "torch==$torch" >"$venv/constraints.txt"
    sed -i '/^torch[<>=]/d' "$venv/requirements.txt"
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$venv/constraints.txt" --requirement "$venv/requirements.txt" || return 1
  # On all cores, unlike pip. Some files of packages are not valid Python.
  "$venv/bin/python" -m compileall -q -j 16 "$venv/lib" >/dev/null 2>&1
  touch "$venv/.ok" # written last, so that an interrupted installation is repeated from the start
}
