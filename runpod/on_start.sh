#!/usr/bin/env bash
# Set up a pod, on every start, from the volume. It never fails the container: a start command that ends with an error
# restarts it, and the meter runs on. As the pod's start command:
#   bash -c 'bash /workspace/gpt2/runpod/on_start.sh & exec /start.sh'
# What it does, each part once and again only where something has changed:
#   POD_HOURS=H   arm the deadline first: after so many hours of this start the pod is stopped
#   the environment on the volume, keyed by the image's Python, torch and CUDA and by requirements.txt; its torch is the image's
#   flash-attn from a wheel that fits, never compiled unless BUILD_FLASH_ATTN=1 says so; else attention is torch's SDPA
#   caches: those that cost much on the volume, those that are many small files in the container
#   python -m gpt2_repro.preflight, into the log, again where the cards or their driver are others
#   AUTO_RUN="…"  a command in a tmux session named run; best runpod/run_and_stop.sh …
# The log is $WORKSPACE/logs/on_start.log; `. $WORKSPACE/gpt2.env` in a shell has the same environment.
set -uo pipefail # no -e: what fails is told, and the rest goes on

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
workspace=${WORKSPACE:-${RP_WORKSPACE:-/workspace}}
log=$workspace/logs/on_start.log

say() { echo "$(date -u +%FT%TZ) $*"; }

arm_deadline() {
  local marker
  [[ -n ${POD_HOURS:-} ]] || return 0
  marker=${TMPDIR:-/tmp}/pod-deadline-${RUNPOD_POD_ID:-here} # in the container: gone with it, as the sleeper is
  # By its name: in a container that was restarted the number may be another process's.
  if [[ -e $marker ]] && grep -qsa stop_pod.sh "/proc/$(cat "$marker")/cmdline"; then return 0; fi
  # shellcheck disable=SC2016,SC2094  # the inner shell's own words; the log's name is only shown
  setsid bash -c 'sleep "$1"; exec bash "$2"' deadline "$(awk -v h="$POD_HOURS" 'BEGIN { printf "%.0f", h * 3600 }')" \
    "$repository/runpod/stop_pod.sh" "$log" </dev/null >>"$log" 2>&1 &
  echo $! >"$marker"
  say "the pod is stopped in $POD_HOURS hours at the latest"
}

# Of an installed torch: its version, which names its CUDA; nothing where there is none. Importing it takes seconds.
torch_version() { "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

fingerprint() {
  local torch
  torch=$(torch_version python) || torch=none
  python -c 'import sys; print("py%d%d-torch" % sys.version_info[:2], end="")'
  echo "$torch-$(sha256sum "$repository/requirements.txt" | cut -c1-12)"
}

set_up_environment() {
  local torch folder=$workspace/venvs/$1
  venv=$folder
  [[ -e $folder/.ok ]] && return 0
  say "installing the environment $1"
  rm -rf "$folder"
  python -m venv --system-site-packages "$folder" || return 1
  # An installed torch is kept, whatever the requirements allow.
  torch=$(torch_version "$folder/bin/python") && echo "torch==$torch" >"$folder/constraints.txt" || : >"$folder/constraints.txt"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" \
    --requirement "$repository/requirements.txt" || return 1
  touch "$folder/.ok" # written last: an interrupted installation is made anew
}

set_up_flash_attn() {
  [[ -e $venv/.flash-attn ]] && return 0
  local wheel found="" answered=1
  "$venv/bin/python" -c 'import flash_attn' 2>/dev/null && found="is in the image"
  while [[ -z $found ]] && read -r wheel; do
    if "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$wheel" 2>/dev/null; then
      if "$venv/bin/python" -c 'import flash_attn' 2>/dev/null; then found=$wheel; continue; fi
      "$venv/bin/python" -m pip uninstall --quiet --yes flash-attn # loads into another torch
    else
      curl --silent --fail --location --head --max-time 20 --output /dev/null "$wheel"
      [[ $? == 22 ]] || answered=0 # 22: there is no such wheel; else the network is to blame, and the next start tries again
    fi
  done < <(cd "$repository" && "$venv/bin/python" -m gpt2_repro.preflight.flash_attn_wheel)
  if [[ -z $found && -n ${BUILD_FLASH_ATTN:-} ]]; then
    say "compiling flash-attn: minutes on many cores, hours on few"
    MAX_JOBS=${MAX_JOBS:-4} "$venv/bin/python" -m pip install --quiet --no-build-isolation --disable-pip-version-check \
      --requirement "$repository/requirements-gpu.txt" && found="was compiled"
  fi
  say "flash-attn: ${found:-no wheel fits, attention is SDPA of torch}"
  if [[ -n $found ]] || ((answered)); then touch "$venv/.flash-attn"; fi
}

write_settings() {
  {
    echo "export HF_HOME=\${HF_HOME:-$workspace/.cache/huggingface}"
    echo "export HF_DATASETS_CACHE=\${HF_DATASETS_CACHE:-\$HOME/.cache/huggingface/datasets}"
    echo "export TORCHINDUCTOR_CACHE_DIR=\${TORCHINDUCTOR_CACHE_DIR:-$workspace/.cache/inductor}"
    echo "export PATH=$venv/bin:\$PATH"
    echo "cd $repository"
  } >"$workspace/gpt2.env"
}

start() {
  arm_deadline
  local looked settings=$workspace/gpt2.env
  if ! set_up_environment "$(fingerprint)"; then
    say "THE ENVIRONMENT COULD NOT BE INSTALLED: see above; the pod is up and paid"
    return
  fi
  set_up_flash_attn
  write_settings
  # shellcheck source=/dev/null
  . "$settings"
  looked=$venv/.preflight-$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sha256sum | cut -c1-12)
  if [[ ! -e $looked ]]; then
    python -m gpt2_repro.preflight && touch "$looked"
  fi
  if [[ -n ${AUTO_RUN:-} ]] && ! tmux has-session -t run 2>/dev/null; then
    printf '. %q\n%s\n' "$settings" "$AUTO_RUN" >"$workspace/auto_run.sh"
    tmux new-session -d -s run "bash $workspace/auto_run.sh 2>&1 | tee -a $workspace/logs/run.log"
    say "started in tmux (tmux attach -t run): $AUTO_RUN"
  fi
  say "ready: . $settings"
}

mkdir -p "$workspace/logs" 2>/dev/null
start >>"$log" 2>&1
exit 0
