#!/usr/bin/env bash
# Train, evaluate, copy the run to another place and stop the pod, unattended and within a deadline.
#   bash runpod/run_and_stop.sh --hours 4 --max_usd 50 --sync hf://buckets/USER/BUCKET -- \
#       accelerate launch --config_file accelerate_configs/zero1.yaml train.py --usd_per_hour 14.32
#
#   --hours H          deadline: stop the pod after H hours. Required unless --keep is passed. The training ends with a
#                      checkpoint five minutes before the deadline. If H is less than 50 minutes, it ends a tenth of H
#                      before the deadline
#   --max_usd USD      add this option to the training command: the training ends with a checkpoint when it has cost this
#                      much. Required unless --keep is passed. The command must have --usd_per_hour, the price of the
#                      machine. Set-up, evaluation and copying come on top, up to the deadline
#   --sync TARGET      copy the run to this target (see sync.sh). The target is checked before the training. Without
#                      --sync the run stays on the volume
#   --no_evaluation    do not run evaluate.sh
#   --grace MINUTES    minutes to wait before stopping the pod after a failure or an early end (default: 15)
#   --keep             never stop the machine. For machines that are not RunPod pods. Do not pass --hours
#
# Ctrl-C or SIGTERM ends the training with a complete checkpoint. The script then skips the evaluation, writes the
# report, copies the run, waits --grace minutes and stops the pod, as after a failure. Closing the terminal has no
# effect. All output is written to the log $WORKSPACE/logs/run-<UTC time>.log. If this folder cannot be written, the
# log is in /tmp. A terminal shows the log. Without a terminal, only the last errors are printed. The log is copied to
# pod.log in the run directory. It has the time and, with --usd_per_hour, the price of each part: set-up, training,
# evaluation, copy, waiting. Only one run_and_stop.sh process can run on a pod.
set -euo pipefail
# shellcheck source=runpod/stop_pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/stop_pod.sh"
hours="" max_usd="" target="" evaluates=1 grace=15 stops=1
while (($#)); do
  option=$1
  case $1 in
    --hours) hours=${2:-}; shift ;;
    --max_usd) max_usd=${2:-}; shift ;;
    --sync) target=${2:-}; shift ;;
    --no_evaluation) evaluates=0 ;;
    --grace) grace=${2:-}; shift ;;
    --keep) stops=0 ;;
    --) shift; break ;;
    *) mistake "Unknown option $1. Pass -- before the training command." ;;
  esac
  shift || mistake "$option needs a value."
done
if ((stops)); then
  [[ -n ${RUNPOD_POD_ID:-} ]] || mistake "This machine is not a RunPod pod, so it cannot be stopped. Pass --keep to run the command without a stop."
  is_positive "$hours" || mistake "--hours is '$hours'. Pass the number of hours after which the pod is stopped."
else
  [[ -z $hours ]] || mistake "--keep never stops the machine. Remove --hours."
fi
[[ $grace == 0 ]] || is_positive "$grace" || mistake "--grace is '$grace'. Pass a number of minutes such as 15."
(($#)) || mistake "The training command is missing. Pass it last: -- accelerate launch … train.py."
if [[ -n $max_usd ]]; then
  is_positive "$max_usd" || mistake "--max_usd is '$max_usd'. Pass a number of dollars such as 15."
  set -- "$@" --max_usd "$max_usd"
fi
if [[ " $* " == *" --max_usd"[\ =]* ]]; then
  [[ " $* " == *" --usd_per_hour"[\ =]* ]] || mistake "--max_usd needs the price of the machine. Add --usd_per_hour to the training command."
elif ((stops)); then
  mistake "--max_usd is missing. Pass the number of dollars that the training may cost, such as --max_usd 15."
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{ exec 9>>"$run_lock"; } 2>/dev/null || say "could not write $run_lock: a second run_and_stop.sh could start"
held=0
flock -n -E 75 9 2>/dev/null || held=$?
((held != 75)) || mistake "Another run_and_stop.sh is running on this pod. End it first."
{ echo $$ >"$run_lock"; } 2>/dev/null || :
export RSYNC_RSH=${RSYNC_RSH:-ssh -o BatchMode=yes} # the script is unattended: never prompt for a password
if [[ -n $target ]]; then bash runpod/sync.sh --check "$target" || mistake "Cannot copy to --sync $target. Nothing was started."; fi

log=$(log_file "run-$(date -u +%Y%m%dT%H%M%SZ).log")
note=$temporary/run_and_stop.$$ # the supervisor writes the path of the run directory to this file
rm -f "$note" 2>/dev/null || :
say "log: $log"
# Descriptor 8 gets the last errors. A terminal shows the complete log instead.
exec 8>/dev/null
if [[ -t 1 ]]; then tail -n +1 -f -s 0.2 --pid=$$ "$log" 2>/dev/null 9>&- & else exec 8>&1; fi
exec >>"$log" 2>&1 </dev/null
trap '' HUP
if ((stops)); then bash runpod/deadline.sh "$hours" $$ 8>&- 9>&- || exit 1; fi

set +eu # from here on the script must not end before it has stopped the pod: failures are logged instead
# on_start.sh sets POD_START, the time at which it started.
pod_start=${POD_START:-$EPOCHSECONDS}
part_start=$pod_start
price="" # of the machine, in millionths of a dollar per hour
if [[ " $* " =~ " --usd_per_hour"[\ =]([0-9.]+)" " ]]; then
  per_hour=${BASH_REMATCH[1]}
  if is_positive "$per_hour"; then price=$(seconds "$per_hour" 1000000); fi
fi
# SECONDS: print them with their price.
priced() {
  local cents
  printf '%d s' "$1"
  [[ -n $price ]] || return 0
  cents=$(((price * $1 / 3600 + 5000) / 10000))
  printf ' ($%d.%02d)' $((cents / 100)) $((cents % 100))
}
# PART: log the time and price of the part that ends now. The next part starts at the same moment.
account() {
  local now=$EPOCHSECONDS
  say "time of $1: $(priced $((now - part_start))), since the start of the pod: $(priced $((now - pod_start)))"
  part_start=$now
}

# shellcheck disable=SC2329  # called by the trap
tell() { # send SIGTERM only once: a launcher that gets it twice dies before it has saved
  ((told)) || { told=1; say "sent SIGTERM: the training saves and ends"; [[ -z $training ]] || kill -TERM "$training"; }
}
main() { # a function is read completely before it runs: the file may change during the hours of training
  local code complete=0 run="" folder copied=0 safe=0 pause
  told=0 training=""
  account "everything before the training"
  trap tell INT TERM
  # A new session: the signals of a terminal (Ctrl-C, hang-up) go to all processes of its session.
  GPT2_REPRO_RUN_NOTE=$note setsid "${PYTHON:-python}" -m gpt2_repro.supervise -- "$@" 8>&- &
  training=$!
  ((told)) && kill -TERM "$training"
  while kill -0 "$training" 2>/dev/null; do wait "$training"; done # a signal ends the wait, not the training
  wait "$training"
  code=$?
  training=""
  { read -r run <"$note"; } 2>/dev/null
  say "the training ended with exit code $code, run directory: ${run:-unknown}"
  account "the training"

  if [[ -n $run ]]; then
    ((code == 0)) && grep -qs '"state": "complete"' "$run/run_status.json" && complete=1
    if ((complete && evaluates)); then
      bash evaluate.sh "$run" || { code=$?; say "the evaluation failed with exit code $code"; }
    fi
    "${PYTHON:-python}" -m gpt2_repro.report "$run" || say "the report failed: continuing without a report"
    account "evaluation and report"
    folder=$run
    cp "$log" "$run/pod.log"
  else
    folder=${log%.log} # copy the logs first: a log that still grows never equals its copy
    mkdir -p "$folder" && cp "$(dirname "$log")"/*.log "$folder"
  fi
  if [[ -n $target ]]; then
    for pause in 0 60 300; do
      rest "$(seconds "$pause" "${SYNC_PAUSE:-1}")"
      bash runpod/sync.sh "$folder" "$target" && copied=1 && break
    done
    if ((!copied)); then
      say "THE COPY FAILED: $folder was not copied completely to $target"
      ((code)) || code=1
    fi
    account "the copy"
  fi
  if [[ -n $run ]]; then
    if ((copied)) || [[ -n ${RUNPOD_VOLUME_ID:-} && $(realpath -m "$run") == "$(realpath -m "$workspace")"/* ]]; then safe=1; fi
  fi
  if ((code)); then
    { grep -E '^(error|[A-Za-z_.]+Error): ' "$log" | tail -n 2; say "exit code $code, see $log"; } 2>/dev/null >&8
  fi
  ((stops)) || exit "$code"
  if ((code || !complete)); then
    say "the pod will be stopped in $grace minutes (to keep the pod until the deadline, run: kill -KILL $$)"
    rest "$(seconds "$grace" 60)" 8>&- 9>&-
    account "waiting"
  fi
  if ((safe)); then stop_pod; else stop_pod stop; fi # terminating the pod would delete a run that was not copied
  exit
}
main "$@"
