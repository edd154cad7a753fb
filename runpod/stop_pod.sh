#!/usr/bin/env bash
# Stop this pod, or terminate it with its disks.
#   bash runpod/stop_pod.sh [stop|terminate …]
#
# Without an argument: terminate if a network volume keeps the data ($RUNPOD_VOLUME_ID), else stop, which keeps the volume
# disk. Several arguments are tried one after the other. RunPod's interfaces change (REST v1 was removed in November 2026), so
# four are tried in turn, without end, until the pod and this script with it are gone. None needs Python.
#   STOP_WAIT (120)    seconds to wait after a request was accepted
#   STOP_ROUNDS (0)    fail after so many rounds; 0: never

# shellcheck disable=SC2329  # the ways are called by their names
set -uo pipefail # no -e: whatever fails here, the next way is tried
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

# The key goes through a pipe: what stands in a command line is seen by everyone.
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
by_graphql() { # its errors come with code 200; podTerminate returns nothing that could be selected
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
    echo "error: there is no '$verb'. Pass stop or terminate to stop_pod.sh" >&2
    return 2
  done
  if [[ -z ${RUNPOD_POD_ID:-} ]]; then
    echo "error: this is not a RunPod pod (RUNPOD_POD_ID is not set). Stop the machine at its provider" >&2
    return 2
  fi
  for ((round = 1; ; round++)); do
    for verb in "$@"; do
      for way in by_command by_old_command by_rest by_graphql; do
        if "$way" "$verb" >/dev/null; then
          say "pod $RUNPOD_POD_ID: $verb asked for, $way"
          rest "$wait"
          say "pod $RUNPOD_POD_ID still runs: the next way"
        else
          say "pod $RUNPOD_POD_ID: $way failed to $verb"
        fi
      done
    done
    pause=$((round < 10 ? 60 * round : 600))
    say "error: POD $RUNPOD_POD_ID STILL RUNS AND IS PAID: end it by hand at https://console.runpod.io/pods;" \
      "all is tried again in $pause s"
    ((round == ${STOP_ROUNDS:-0})) && return 1
    rest "$((pause * wait / 120))"
  done
}

# deadline.sh sources this file, so as not to need it any more hours later.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  trap '' HUP # a stop that was asked for outlives the terminal
  stop_pod "$@"
  exit
fi
