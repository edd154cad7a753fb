#!/usr/bin/env bash
# Set up a pod from its volume. create_pod.sh makes this script the pod's start command. You can also run it by hand.
#   [POD_HOURS=H] [AUTO_RUN="COMMAND"] bash runpod/on_start.sh
#
# It runs these steps in order, and skips steps that are already done:
#   1. Set the deadline: stop the pod after POD_HOURS hours (after 24 if POD_HOURS is not a number).
#   2. Install requirements.txt into a Python environment in the container. The torch of the image is kept.
#   3. Set the cache folders: large files on the volume, many small files in the container.
#   4. Start python -m gpt2_repro.preflight in the background.
#   5. Run the command AUTO_RUN, preferably runpod/run_and_stop.sh …, in a tmux session named run, or in the background
#      if tmux fails. If step 2 or the command fails, the pod is stopped after START_GRACE minutes (default: 15). A
#      command with --keep never stops it.
#
# The log is $WORKSPACE/logs/on_start.log, or /tmp/on_start.log. `. ~/gpt2.env` activates the environment in a shell.
# Failures are logged and the exit code is always 0: RunPod restarts a container whose start command fails, and the
# restarts cost money.
set -uo pipefail # no -e: the exit code must be 0

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=runpod/environment.sh
. "$repository/runpod/environment.sh"
(($# == 0)) || mistake "Unknown option $1."
export HOME=${HOME:-/root}
pod_start=$EPOCHSECONDS
settings=$HOME/gpt2.env # in the container, because the next pod with this volume may have another image

arm_deadline() {
  local hours=${POD_HOURS:-${AUTO_RUN:+not set}}
  [[ -n $hours ]] || return
  is_positive "$hours" || { say "POD_HOURS IS '$hours', NOT A NUMBER OF HOURS: the deadline is 24 hours"; hours=24; }
  bash "$repository/runpod/deadline.sh" "$hours"
}

# shellcheck disable=SC2016  # the variables are expanded by the shell that sources the file
write_settings() {
  printf 'export HF_HOME=${HF_HOME:-%q}\nexport HF_DATASETS_CACHE=${HF_DATASETS_CACHE:-%q}\n' \
    "$workspace/.cache/huggingface" "$HOME/.cache/huggingface/datasets"
  printf 'export POD_START=%q\n' "$pod_start"
  printf 'export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-%q}\nexport PATH=%q:$PATH\ncd %q\n' \
    "$workspace/.cache/inductor" "$venv/bin" "$repository"
}

# shellcheck disable=SC2016  # $code is expanded by the shell that runs the command
run_by_itself() {
  local script=$HOME/auto_run.sh command grace=${START_GRACE:-15}
  (umask 077; rm -f "$script"; printf '. %q\n%s\n' "$settings" "$AUTO_RUN" >"$script") # AUTO_RUN may contain keys: never log it
  # Only once, even if this script runs twice: the second has exit code 75.
  printf -v command 'flock -n -E 75 %q bash %q; code=$?; echo "AUTO_RUN ended with exit code $code"; ' \
    "$HOME/auto_run.lock" "$script"
  if [[ $AUTO_RUN != *--keep* ]]; then # a command that refuses to start stops nothing by itself
    command+='[ $code = 0 ] || [ $code = 75 ] || { '
    printf -v command '%s echo "The pod stops in %s minutes. Press Ctrl-C to keep it."; sleep %s; bash %q; }; ' \
      "$command" "$grace" "$(seconds "$grace" 60)" "$repository/runpod/stop_pod.sh"
  fi
  if tmux has-session -t run 2>/dev/null; then
    say "the tmux session run already exists: AUTO_RUN was not started again"
  elif tmux new-session -d -s run "${command}exec bash"; then
    say "started AUTO_RUN in tmux. To see its output, run: tmux attach -t run"
  else
    setsid bash -c "$command" </dev/null >>"$(log_file auto_run.log)" 2>&1 &
    say "TMUX FAILED: started AUTO_RUN without a terminal; its log is $(log_file auto_run.log)"
  fi
}

start() {
  # shellcheck source=/dev/null
  if ! { set_up && write_settings >"$settings" && . "$settings"; }; then
    say "THE ENVIRONMENT COULD NOT BE INSTALLED: see the errors above. The pod is running and costs money."
    [[ -n ${AUTO_RUN:-} ]] || return
    say "AUTO_RUN cannot start: the pod stops in ${START_GRACE:-15} minutes (to keep the pod, run: kill -KILL $$)"
    rest "$(seconds "${START_GRACE:-15}" 60)"
    bash "$repository/runpod/stop_pod.sh"
    return
  fi
  setsid python -m gpt2_repro.preflight </dev/null &
  [[ -n ${AUTO_RUN:-} ]] && run_by_itself
  say "the pod is ready: . $settings (this command activates the environment)"
}

log=$(log_file on_start.log)
{ arm_deadline; start; } >>"$log" 2>&1
exit 0
