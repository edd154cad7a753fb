#!/usr/bin/env bash
# Train, evaluate, copy the run to another place and stop the pod, without supervision and within a deadline.
#   bash runpod/run_and_stop.sh --hours 4 --sync hf://buckets/USER/BUCKET -- \
#       accelerate launch --config_file accelerate_configs/zero1.yaml train.py
#
#   --hours H          the deadline: the pod is stopped after so many hours. Required. Five minutes before it (a tenth of the
#                      time if that is less) the training ends with a checkpoint.
#   --sync TARGET      copy the run to this target of sync.sh, which is tried before the training. Without it the run stays on
#                      the volume
#   --no_evaluation    do not run evaluate.sh
#   --grace MINUTES    (15) after a failure or an early end, wait so long before the pod is stopped
#   --keep             never stop the machine: for a machine that is not a pod; without --hours
#
# Ctrl-C or SIGTERM ends the training with a complete checkpoint, and the rest follows as after a failure. Closing the terminal
# has no effect: the output is written to $WORKSPACE/logs/run-<UTC time>.log (or /tmp), which the terminal follows, and
# it is copied as console.log into the run. Only one can run on a pod.
set -euo pipefail
# shellcheck source=runpod/stop_pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/stop_pod.sh"
hours="" target="" evaluates=1 grace=15 stops=1
while (($#)); do
  case $1 in
    --hours) hours=${2:-}; shift ;;
    --sync) target=${2:-}; shift ;;
    --no_evaluation) evaluates=0 ;;
    --grace) grace=${2:-}; shift ;;
    --keep) stops=0 ;;
    --) shift; break ;;
    -*) mistake "There is no option $1. Pass the training command last, after --" ;;
    *) mistake "Pass -- before the command: -- $*" ;;
  esac
  shift || mistake "an option needs its value"
done
if ((stops)); then
  [[ -n ${RUNPOD_POD_ID:-} ]] || mistake "this is not a RunPod pod. Pass --keep"
  is_positive "$hours" || mistake "--hours is '$hours'. Pass a positive number such as 4: then the pod is stopped"
else
  [[ -z $hours ]] || mistake "--keep never stops the machine. Remove --hours"
fi
[[ $grace == 0 ]] || is_positive "$grace" || mistake "--grace is a number of minutes such as 15, not '$grace'"
(($#)) || mistake "there is no command. Pass it last: -- accelerate launch … train.py"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{ exec 9>>"$run_lock"; } 2>/dev/null || say "$run_lock cannot be written: nothing keeps a second run away"
held=0
flock -n -E 75 9 2>/dev/null || held=$?
((held != 75)) || mistake "another run_and_stop.sh runs on this pod: end it first"
{ echo $$ >"$run_lock"; } 2>/dev/null || :
export RSYNC_RSH=${RSYNC_RSH:-ssh -o BatchMode=yes} # nobody is there to type a password
if [[ -n $target ]]; then bash runpod/sync.sh --check "$target" || mistake "--sync $target would fail after the training"; fi

log=$(log_file "run-$(date -u +%Y%m%dT%H%M%SZ).log")
note=$temporary/run_and_stop.$$ # where the supervisor says which folder the run is in
rm -f "$note" 2>/dev/null || :
say "everything is written to $log"
if [[ -t 1 ]]; then tail -n +1 -f -s 0.2 --pid=$$ "$log" 2>/dev/null 9>&- & fi
exec >>"$log" 2>&1 </dev/null
trap '' HUP
if ((stops)); then bash runpod/deadline.sh "$hours" $$ 9>&- || exit 1; fi

set +eu # from here on nothing may end this script before it has stopped the pod: what fails is told
# shellcheck disable=SC2329  # the trap calls it
tell() { # once: a launcher that is told twice dies before it has saved
  ((told)) || { told=1; say "the training is told to end"; [[ -z $training ]] || kill -TERM "$training"; }
}
main() { # read whole before it starts: the file may change while hours go by
  local code complete=0 run="" folder copied=0 safe=0 pause
  told=0 training=""
  trap tell INT TERM
  # In a session of its own: what a terminal sends, it sends to all of its session.
  GPT2_REPRO_RUN_NOTE=$note setsid "${PYTHON:-python}" -m gpt2_repro.supervise -- "$@" &
  training=$!
  ((told)) && kill -TERM "$training"
  while kill -0 "$training" 2>/dev/null; do wait "$training"; done # a signal ends the wait, not the training
  wait "$training"
  code=$?
  training=""
  { read -r run <"$note"; } 2>/dev/null
  say "the training ended with exit code $code: ${run:-it has named no run folder}"

  if [[ -n $run ]]; then
    ((code == 0)) && grep -qs '"state": "complete"' "$run/run_status.json" && complete=1
    if ((complete && evaluates)); then
      bash evaluate.sh "$run" || { code=$?; say "the evaluation failed with exit code $code"; }
    fi
    "${PYTHON:-python}" -m gpt2_repro.report "$run" || say "there is no report"
    folder=$run
    cp "$log" "$run/console.log"
  else
    folder=${log%.log} # a copy of the logs: one that grows never compares equal
    mkdir -p "$folder" && cp "$(dirname "$log")"/*.log "$folder"
  fi
  if [[ -n $target ]]; then
    for pause in 0 60 300; do
      rest "$(seconds "$pause" "${SYNC_PAUSE:-1}")"
      bash runpod/sync.sh "$folder" "$target" && copied=1 && break
    done
    if ((!copied)); then
      say "THE COPY FAILED: $folder is not in $target"
      ((code)) || code=1
    fi
  fi
  if [[ -n $run ]]; then
    if ((copied)) || [[ -n ${RUNPOD_VOLUME_ID:-} && $(realpath -m "$run") == "$(realpath -m "$workspace")"/* ]]; then safe=1; fi
  fi
  ((stops)) || exit "$code"
  if ((code || !complete)); then
    say "waiting $grace minutes for somebody to look; the pod is stopped then (kill -KILL $$ keeps it until the deadline)"
    rest "$(seconds "$grace" 60)" 9>&-
  fi
  if ((safe)); then stop_pod; else stop_pod stop; fi # what was not copied must not go with the pod
  exit
}
main "$@"
