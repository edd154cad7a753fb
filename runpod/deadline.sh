#!/usr/bin/env bash
# Arm a deadline and return: so many hours from now this pod is stopped, whatever runs. RunPod has no timer of its own.
#   bash runpod/deadline.sh HOURS          of the pod's start; one that is armed already is kept
#   bash runpod/deadline.sh HOURS PROCESS  of a run; it replaces the deadline of an earlier run
# Five minutes before it (a tenth of the time where that is less) the run_and_stop.sh of this pod is sent SIGTERM, so that the
# training ends with a checkpoint: PROCESS, or whichever runs then. The pod is stopped first, because a run that was not
# copied may lie outside the volume; where no stop works and a network volume keeps the data, it is terminated.
# The deadline is a process in a session of its own. Its log: $WORKSPACE/logs/deadline.log, or /tmp where that cannot be written.
set -uo pipefail # no -e: a deadline that has ended early ends no bill
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
if ! is_positive "$hours"; then
  echo "error: '$hours' is no number of hours: bash runpod/deadline.sh HOURS, as 4 or 0.5" >&2
  exit 2
fi
if [[ -z ${RUNPOD_POD_ID:-} ]]; then
  echo "error: this is no RunPod pod (RUNPOD_POD_ID is not set): a deadline could stop nothing" >&2
  exit 2
fi
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
