#!/usr/bin/env bash
# Set up a pod from its volume. create_pod.sh makes this the pod's start command, and it can be run by hand.
#   [POD_HOURS=H] [AUTO_RUN="COMMAND"] bash runpod/on_start.sh
#
# In this order; a part that is done already is skipped:
#   1. The deadline: the pod is stopped after POD_HOURS hours; after 24 if that is not a number.
#   2. The Python environment on the volume, one for each Python, torch, CUDA and requirements.txt. The image's torch is kept.
#   3. flash-attn, if there is a wheel that fits. BUILD_FLASH_ATTN=1 compiles it otherwise. Without it attention is torch's SDPA.
#   4. Caches: large ones on the volume, many small files in the container.
#   5. python -m gpt2_repro.preflight, in the background.
#   6. AUTO_RUN, best a runpod/run_and_stop.sh …: in a tmux session named run, or in the background if tmux fails. If the
#      environment could not be installed, the pod is stopped after START_GRACE (15) minutes instead.
#
# The log is $WORKSPACE/logs/on_start.log, or /tmp/on_start.log. `. ~/gpt2.env` gives a shell the same environment.
# Failures are logged and the exit code is 0: RunPod restarts a container whose start command fails, which costs money.
set -uo pipefail # no -e: see above

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=runpod/environment.sh
. "$repository/runpod/environment.sh"
(($# == 0)) || mistake "there is no option $1"
export HOME=${HOME:-/root}
settings=$HOME/gpt2.env # in the container: the next pod on this volume may have another image

arm_deadline() {
  local hours=${POD_HOURS:-${AUTO_RUN:+not set}}
  [[ -n $hours ]] || return
  is_positive "$hours" || { say "POD_HOURS IS '$hours', WHICH IS NO NUMBER OF HOURS: 24 are taken"; hours=24; }
  bash "$repository/runpod/deadline.sh" "$hours"
}

# shellcheck disable=SC2016  # the variables are for the shell that reads the file
write_settings() {
  printf 'export HF_HOME=${HF_HOME:-%q}\nexport HF_DATASETS_CACHE=${HF_DATASETS_CACHE:-%q}\n' \
    "$workspace/.cache/huggingface" "$HOME/.cache/huggingface/datasets"
  printf 'export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-%q}\nexport PATH=%q:$PATH\ncd %q\n' \
    "$workspace/.cache/inductor" "$venv/bin" "$repository"
}

run_by_itself() {
  local script=$HOME/auto_run.sh command
  (umask 077; rm -f "$script"; printf '. %q\n%s\n' "$settings" "$AUTO_RUN" >"$script") # it may hold keys: into no log
  printf -v command 'flock -n %q bash %q' "$HOME/auto_run.lock" "$script" # once, also where this script runs twice
  if tmux has-session -t run 2>/dev/null; then
    say "the tmux session run is there already: AUTO_RUN is not started again"
  elif tmux new-session -d -s run "$command; echo \"AUTO_RUN ended with exit code \$?\"; exec bash"; then
    say "AUTO_RUN was started in tmux (tmux attach -t run)"
  else
    setsid bash -c "$command" </dev/null >>"$(log_file auto_run.log)" 2>&1 &
    say "TMUX FAILED: AUTO_RUN was started without a terminal, its log is $(log_file auto_run.log)"
  fi
}

start() {
  # shellcheck source=/dev/null
  if ! { set_up && write_settings >"$settings" && . "$settings"; }; then
    say "THE ENVIRONMENT COULD NOT BE INSTALLED: see above; the pod is up and paid"
    [[ -n ${AUTO_RUN:-} ]] || return
    say "AUTO_RUN cannot start: the pod is stopped in ${START_GRACE:-15} minutes (kill -KILL $$ keeps it)"
    rest "$(seconds "${START_GRACE:-15}" 60)"
    bash "$repository/runpod/stop_pod.sh"
    return
  fi
  setsid python -m gpt2_repro.preflight </dev/null &
  [[ -n ${AUTO_RUN:-} ]] && run_by_itself
  say "ready: . $settings"
}

log=$(log_file on_start.log)
{ arm_deadline; start; } >>"$log" 2>&1
exit 0
