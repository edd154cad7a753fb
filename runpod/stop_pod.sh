#!/usr/bin/env bash
# Stop this pod, or terminate it with its disks, by whichever way still works; loudly where none does.
#   bash runpod/stop_pod.sh [stop|terminate]
# Without a word: terminate where a network volume keeps the data ($RUNPOD_VOLUME_ID), else stop, which keeps the volume
# disk. RunPod's interfaces come and go (REST v1 went in November 2026), so four are tried, one after the other, for as long
# as this script lives: a pod that has stopped takes it along.
#   STOP_WAIT (120)    seconds for a pod to go after it was told to
#   STOP_ROUNDS (10)   times through all ways, a minute longer apart each time
# shellcheck disable=SC2329  # the ways are called by their names
set -euo pipefail

id=${RUNPOD_POD_ID:-}
if [[ -z $id ]]; then
  echo "error: this is no RunPod pod (RUNPOD_POD_ID is not set): stop the machine where you rented it" >&2
  exit 2
fi
verb=${1:-$([[ -n ${RUNPOD_VOLUME_ID:-} ]] && echo terminate || echo stop)}
case $verb in
  stop) new=stop old=stop mutation=podStop ;;
  terminate) new=delete old=remove mutation=podTerminate ;;
  *) echo "error: stop_pod.sh knows stop and terminate, not '$verb'" >&2; exit 2 ;;
esac

# The key goes through a pipe: what stands in a command line is seen by everyone.
request() {
  printf 'header = "Authorization: Bearer %s"\n' "${RUNPOD_API_KEY:-}" |
    curl --config - --fail --silent --show-error --max-time 60 --request POST --header 'Content-Type: application/json' "$@"
}
by_command() { timeout 60 runpodctl pod "$new" "$id"; }
by_old_command() { timeout 60 runpodctl "$old" pod "$id"; }
by_rest() { request --data "{\"action\":\"$verb\"}" "https://api.runpod.io/v2/pods/$id/action"; }
by_graphql() {
  local answer
  answer=$(request --data "{\"query\":\"mutation { $mutation(input: {podId: \\\"$id\\\"}) { id } }\"}" https://api.runpod.io/graphql)
  [[ $answer != *'"errors"'* ]]
}

for ((round = 1; round <= ${STOP_ROUNDS:-10}; round++)); do
  for way in by_command by_old_command by_rest by_graphql; do
    if "$way" >/dev/null; then
      echo "$(date -u +%FT%TZ) pod $id: $verb asked for, $way"
      sleep "${STOP_WAIT:-120}"
      echo "$(date -u +%FT%TZ) pod $id still runs: the next way" >&2
    else
      echo "$(date -u +%FT%TZ) pod $id: $way failed" >&2
    fi
  done
  sleep "$((60 * round * ${STOP_WAIT:-120} / 120))"
done
echo "error: POD $id STILL RUNS AND IS PAID: $verb it by hand at https://console.runpod.io/pods" >&2
exit 1
