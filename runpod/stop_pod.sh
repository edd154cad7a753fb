#!/usr/bin/env bash
# Stop this pod, or terminate it together with its disks.
#   bash runpod/stop_pod.sh [stop|terminate …]
#
# Without an argument, a pod with a network volume ($RUNPOD_VOLUME_ID) is terminated. The volume keeps the data. Any
# other pod is stopped, which keeps its volume disk. If you pass both stop and terminate, they are tried in the given
# order until the pod ends. RunPod's interfaces change (REST v1 was removed in November 2026), so four interfaces are
# tried one after the other. The attempts are repeated until the pod ends, which also ends this script. No interface
# needs Python.
# Environment variables:
#   STOP_WAIT      seconds from an accepted request until the next interface is tried (default: 120)
#   STOP_ROUNDS    number of rounds of attempts after which the script gives up (default: 0, it never gives up)

# shellcheck disable=SC2329  # the functions by_* are called by name
set -uo pipefail # no -e: after a failure the next interface is tried
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

# The API key is passed through a pipe, because all users of a machine can see command lines.
request() {
  printf 'header = "Authorization: Bearer %s"\n' "${RUNPOD_API_KEY:-}" |
    curl --config - --fail --silent --show-error --max-time 60 --request POST --header 'Content-Type: application/json' "$@"
}
by_command() {
  local word=stop
  [[ $1 == terminate ]] && word=delete
  timeout -k 5 60 runpodctl pod "$word" "$RUNPOD_POD_ID"
}
by_old_command() {
  local word=stop
  [[ $1 == terminate ]] && word=remove
  timeout -k 5 60 runpodctl "$word" pod "$RUNPOD_POD_ID"
}
by_rest() { request --data "{\"action\":\"$1\"}" "https://api.runpod.io/v2/pods/$RUNPOD_POD_ID/action"; }
by_graphql() { # errors are returned with HTTP status 200; podTerminate has no return value that could be selected
  local answer mutation="podStop(input: {podId: \\\"$RUNPOD_POD_ID\\\"}) { id }"
  [[ $1 == terminate ]] && mutation="podTerminate(input: {podId: \\\"$RUNPOD_POD_ID\\\"})"
  answer=$(request --data "{\"query\":\"mutation { $mutation }\"}" https://api.runpod.io/graphql)
  [[ $answer == *'"data"'* && $answer != *'"errors"'* ]]
}

stop_pod() {
  local verb way round pause wait=${STOP_WAIT:-120}
  if ((!$#)); then set -- "$([[ -n ${RUNPOD_VOLUME_ID:-} ]] && echo terminate || echo stop)"; fi
  for verb in "$@"; do
    [[ $verb == stop || $verb == terminate ]] && continue
    echo "error: Unknown argument '$verb'. Pass stop or terminate to stop_pod.sh." >&2
    return 2
  done
  if [[ -z ${RUNPOD_POD_ID:-} ]]; then
    echo "error: RUNPOD_POD_ID is not set, so this is not a RunPod pod. Stop the machine on its provider's page." >&2
    return 2
  fi
  for ((round = 1; ; round++)); do
    for verb in "$@"; do
      for way in by_command by_old_command by_rest by_graphql; do
        if "$way" "$verb" >/dev/null; then
          say "pod $RUNPOD_POD_ID: the request to $verb was accepted ($way)"
          rest "$wait"
          say "pod $RUNPOD_POD_ID is still running: trying the next interface"
        else
          say "pod $RUNPOD_POD_ID: the request to $verb failed ($way)"
        fi
      done
    done
    pause=$((round < 10 ? 60 * round : 600))
    say "error: POD $RUNPOD_POD_ID IS STILL RUNNING AND COSTS MONEY. End the pod at https://console.runpod.io/pods." \
      "The next attempt is in $pause s."
    ((round == ${STOP_ROUNDS:-0})) && return 1
    rest "$((pause * wait / 120))"
  done
}

# Only if this file is executed. deadline.sh sources it, to have its functions in memory even if the file is deleted.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  trap '' HUP # continue after the terminal was closed
  stop_pod "$@"
  exit
fi
