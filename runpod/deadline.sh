#!/usr/bin/env bash
# Start a timer that stops this pod after so many hours, and return. RunPod has no timer of its own.
#   bash runpod/deadline.sh HOURS          for the pod; a deadline of the pod that exists is kept
#   bash runpod/deadline.sh HOURS PROCESS  for a run_and_stop.sh; it replaces the deadline of an earlier run
#
# Five minutes before the deadline (a tenth of the time if that is less) the run_and_stop.sh of this pod gets SIGTERM, so that
# the training ends with a checkpoint: PROCESS, or the one that runs then. The pod is stopped first, because a run that was not
# copied may lie outside of the volume. If no way to stop it works and a network volume keeps the data, it is terminated.
# The timer is a process in its own session. Its log is $WORKSPACE/logs/deadline.log, or in /tmp if that cannot be written.
set -uo pipefail # no -e: a timer that ends early does not stop the pod
# shellcheck source=runpod/stop_pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/stop_pod.sh"

# The deadline itself. Everything it needs is in memory: the files may be others by then.
if [[ ${1:-} == --armed ]]; then
  wait_and_stop() {
    local whole=$1 pid=$2 last verbs=(stop)
    last=$((whole < 3000 ? (whole + 9) / 10 : 300))
    [[ -n ${RUNPOD_VOLUME_ID:-} ]] && verbs+=(terminate)
    rest "$((whole - last))"
    [[ -n $pid ]] || { read -r pid <"$run_lock"; } 2>/dev/null
    if is_running "${pid:-none}" run_and_stop.sh; then
      say "the deadline is near: the training is told to end"
      kill -TERM "$pid"
    fi
    rest "$last"
    say "the deadline: stopping the pod"
    stop_pod "${verbs[@]}"
    exit
  }
  wait_and_stop "$3" "${4:-}"
fi

hours=${1:-} pid=${2:-}
is_positive "$hours" || mistake "'$hours' is not a number of hours. Pass a positive number such as 4 or 0.5"
[[ -z $pid || $pid =~ ^[0-9]+$ ]] || mistake "'$pid' is not the number of a process"
[[ -n ${RUNPOD_POD_ID:-} ]] || mistake "this is not a RunPod pod (RUNPOD_POD_ID is not set), so it could not be stopped"
purpose=start
[[ -n $pid ]] && purpose=run
marker=$temporary/deadline-$purpose-$RUNPOD_POD_ID
armed="deadline.sh --armed $purpose"
before=""
{ read -r before <"$marker"; } 2>/dev/null
if is_running "${before:-none}" "$armed"; then
  if [[ $purpose == start ]]; then
    say "a deadline of the pod's start is armed already (process $before)"
    exit 0
  fi
  kill -- "-$before"
  say "the deadline of an earlier run (process $before) is replaced"
fi
log=$(log_file deadline.log)
setsid bash "${BASH_SOURCE[0]}" --armed "$purpose" "$(seconds "$hours" 3600)" "$pid" </dev/null >>"$log" 2>&1 &
process=$!
{ echo "$process" >"$marker"; } 2>/dev/null || say "$marker cannot be written: a second deadline would not know this one"
for _ in {1..20}; do
  if is_running "$process" "$armed"; then
    say "the pod is stopped in $hours hours at the latest (process $process, $log)"
    exit 0
  fi
  read -rt 0.1 <> <(:) || :
done
say "error: THE DEADLINE COULD NOT BE ARMED, see $log"
exit 1
