#!/usr/bin/env bash
# Train, evaluate, copy the run away, and stop the pod: unattended, whatever happens, within a deadline.
#   bash runpod/run_and_stop.sh --hours 4 --sync hf://buckets/USER/BUCKET -- \
#       accelerate launch --config_file accelerate_configs/zero1.yaml train.py
#   --hours H          the deadline, armed first: then the pod is stopped, whatever runs. Required. Five minutes before it (a tenth of it
#                      where that is less) the training is told to end with a checkpoint.
#   --sync TARGET      where sync.sh copies the run; without it the run stays on the volume
#   --no_evaluation    leave evaluate.sh to a cheaper machine
#   --grace MINUTES    (15) wait so long before the pod is stopped after a failure, for somebody to look
#   --keep             do everything but stop the pod
# A SIGTERM ends the training with a complete checkpoint; then all goes on as after a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mistake() { echo "error: $1; see the head of runpod/run_and_stop.sh" >&2; exit 2; }

hours="" target="" evaluates=1 grace=15 stops=1
while (($#)); do
  case $1 in
    --hours) hours=${2:-}; shift ;;
    --sync) target=${2:-}; shift ;;
    --no_evaluation) evaluates=0 ;;
    --grace) grace=${2:-}; shift ;;
    --keep) stops=0 ;;
    --) shift; break ;;
    *) mistake "there is no option $1" ;;
  esac
  shift || mistake "an option needs its value"
done
[[ $hours =~ ^[0-9]*\.?[0-9]+$ ]] || mistake "--hours H is needed: the deadline after which the pod is stopped"
[[ $grace =~ ^[0-9]*\.?[0-9]+$ ]] || mistake "--grace wants minutes"
(($#)) || mistake "there is no command: -- accelerate launch … train.py"
if ((stops)) && [[ -z ${RUNPOD_POD_ID:-} ]]; then mistake "this is no RunPod pod: type --keep"; fi
python=${PYTHON:-python}

# Where train.py writes, by its own rule: --output_dir, or runs/ and the recipe's name.
run=runs/gpt2_124m previous=""
for word in "$@"; do
  if [[ $previous == train.py || $previous == */train.py ]] && [[ $word == *.yaml ]]; then run=runs/$(basename "$word" .yaml); fi
  previous=$word
done
previous=""
for word in "$@"; do
  [[ $previous == --output_dir ]] && run=$word
  [[ $word == --output_dir=* ]] && run=${word#*=}
  previous=$word
done

say() { echo "$(date -u +%FT%TZ) $*"; }
seconds() { awk -v number="$1" -v unit="$2" 'BEGIN { printf "%.0f", number * unit }'; }

if ((stops)); then
  log=${WORKSPACE:-${RP_WORKSPACE:-/workspace}}/logs/deadline.log
  mkdir -p "$(dirname "$log")"
  whole=$(seconds "$hours" 3600)
  last=$((whole < 3000 ? whole / 10 : 300))
  # In a session of its own and with a log of its own, so that nothing that ends this one ends it.
  # shellcheck disable=SC2016,SC2094  # the inner shell's own words; the log's name is only shown
  setsid bash -c '
    sleep "$1"
    if grep -qsa run_and_stop.sh "/proc/$3/cmdline"; then
      echo "$(date -u +%FT%TZ) the deadline is near: the training is told to end"
      kill -TERM "$3"
    fi
    sleep "$2"
    echo "$(date -u +%FT%TZ) the deadline: stopping the pod"
    exec bash runpod/stop_pod.sh' deadline "$((whole - last))" "$last" "$$" </dev/null >>"$log" 2>&1 &
  say "the pod is stopped in $hours hours at the latest (process $!, $log)"
fi

training=""
trap '[[ -n $training ]] && kill -TERM "$training" 2>/dev/null || true' TERM INT HUP
"$python" -m gpt2_repro.supervise -- "$@" &
training=$!
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ends the wait, not the training
  code=0
  wait "$training" || code=$?
done
training=""
trap - INT # from here on Ctrl-C ends this script; the deadline stays
say "the training ended with exit code $code: $run"

if ((evaluates)) && grep -qs '"state": "complete"' "$run/run_status.json"; then
  bash evaluate.sh "$run" || { code=$?; say "the evaluation failed with exit code $code"; }
fi
"$python" -m gpt2_repro.report "$run" || true
copied=1
if [[ -n $target ]]; then
  for pause in 0 60 300; do
    sleep "$(seconds "$pause" "${SYNC_PAUSE:-1}")"
    if bash runpod/sync.sh "$run" "$target"; then copied=1; break; else copied=0; fi
  done
fi
if ((!stops)); then exit "$code"; fi
if ((code)); then
  say "waiting $grace minutes for somebody to look; the pod is stopped then"
  sleep "$(seconds "$grace" 60)"
fi
# What was not copied must not go with the pod: stopping keeps the volume disk.
if ((copied)); then bash runpod/stop_pod.sh; else bash runpod/stop_pod.sh stop; fi
