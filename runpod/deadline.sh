#!/usr/bin/env bash
# Start a background timer that stops this pod after HOURS hours.
#   bash runpod/deadline.sh HOURS          set the deadline of the pod, unless it already has one
#   bash runpod/deadline.sh HOURS PROCESS  set the deadline of the run_and_stop.sh process with the id PROCESS. The
#                                          deadline of an earlier run_and_stop.sh process is removed
#
# RunPod has no working timer, so this script provides one. Five minutes before the deadline, the timer sends SIGTERM
# to run_and_stop.sh, so that the training ends with a checkpoint. If HOURS is less than 50 minutes, the signal is sent
# a tenth of HOURS before the deadline. It is sent to PROCESS, or without PROCESS to the run_and_stop.sh process that is
# running at that time.
# At the deadline the timer tries to stop the pod. It does not try to terminate the pod first, because a run that was
# not copied may be outside the network volume and would be deleted. The timer terminates the pod only if all requests
# to stop it fail and the pod has a network volume.
# The timer is a process in a separate session. Its log is $WORKSPACE/logs/deadline.log, or /tmp/deadline.log.
set -uo pipefail # no -e: a timer that exits early would not stop the pod
# shellcheck source=runpod/stop_pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/stop_pod.sh"

# The timer process. All its code is in memory before it waits, because the files may have changed by then.
if [[ ${1:-} == --armed ]]; then
  wait_and_stop() {
    local whole=$1 pid=$2 last verbs=(stop)
    last=$((whole < 3000 ? (whole + 9) / 10 : 300))
    [[ -n ${RUNPOD_VOLUME_ID:-} ]] && verbs+=(terminate)
    rest "$((whole - last))"
    [[ -n $pid ]] || { read -r pid <"$run_lock"; } 2>/dev/null
    if is_running "${pid:-none}" run_and_stop.sh; then
      say "the deadline is near: sent SIGTERM to the training, which saves a checkpoint and ends"
      kill -TERM "$pid"
    fi
    rest "$last"
    say "the deadline was reached: stopping the pod"
    stop_pod "${verbs[@]}"
    exit
  }
  wait_and_stop "$3" "${4:-}"
fi

hours=${1:-} pid=${2:-}
is_positive "$hours" || mistake "'$hours' is not a number of hours. Pass a positive number such as 4 or 0.5."
[[ -z $pid || $pid =~ ^[0-9]+$ ]] || mistake "'$pid' is not a process id. Pass the id of a run_and_stop.sh process."
[[ -n ${RUNPOD_POD_ID:-} ]] || mistake "RUNPOD_POD_ID is not set. This machine is not a RunPod pod."
purpose=start
[[ -n $pid ]] && purpose=run
marker=$temporary/deadline-$purpose-$RUNPOD_POD_ID
armed="deadline.sh --armed $purpose"
before=""
{ read -r before <"$marker"; } 2>/dev/null
if is_running "${before:-none}" "$armed"; then
  if [[ $purpose == start ]]; then
    say "the pod already has a deadline (process $before), which is kept"
    exit 0
  fi
  kill -- "-$before"
  say "replaced the deadline of an earlier run (process $before)"
fi
log=$(log_file deadline.log)
setsid bash "${BASH_SOURCE[0]}" --armed "$purpose" "$(seconds "$hours" 3600)" "$pid" </dev/null >>"$log" 2>&1 &
process=$!
{ echo "$process" >"$marker"; } 2>/dev/null || say "cannot write $marker: a later deadline.sh cannot replace this timer"
for _ in {1..20}; do
  if is_running "$process" "$armed"; then
    say "the pod will be stopped in $hours hours at the latest (process $process, log $log)"
    exit 0
  fi
  read -rt 0.1 <> <(:) || :
done
say "error: THE DEADLINE COULD NOT BE ARMED: the timer did not start and will not stop this pod. See $log."
exit 1
