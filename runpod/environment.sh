#!/usr/bin/env bash
# Functions that create the Python environment in $venv on the volume. Only to be sourced by on_start.sh.
# Pods with the same image share the environment. A lock ensures that one pod at a time creates it.

# shellcheck disable=SC2154  # $repository is set by on_start.sh
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

set_up() {
  local code
  venv=$workspace/venvs/$(fingerprint)
  mkdir -p "$workspace/venvs"
  # Continue without a lock if the file system does not support locks, as some network file systems.
  if ! { { exec 8>>"$workspace/venvs/.lock"; } 2>/dev/null && flock -w 1800 8; }; then say "continuing without a lock on $workspace/venvs"; fi
  set_up_environment
  code=$?
  exec 8>&-
  return "$code"
}

# Print the version of the installed torch, which includes the CUDA version. Fail if torch is not installed. torch is
# not imported, because the import takes seconds.
torch_version() { "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

fingerprint() {
  local torch
  torch=$(torch_version python) || torch=none
  python -c 'import sys; print("py%d%d-torch" % sys.version_info[:2], end="")'
  echo "$torch-$(sha256sum "$repository/requirements.txt" | cut -c1-12)"
}

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
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" \
    --requirement "$venv/requirements.txt" || return 1
  touch "$venv/.ok" # written last, so that an interrupted installation is repeated from the start
}
