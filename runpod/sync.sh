#!/usr/bin/env bash
# Copy a run to another place and compare the copy with it: exit code 0 only where everything has arrived.
#   bash runpod/sync.sh runs/gpt2_124m hf://buckets/USER/BUCKET      the Hub's buckets, sizes compared; HF_TOKEN in the environment
#   bash runpod/sync.sh runs/gpt2_124m user@host:backup/             by rsync, every byte compared
set -euo pipefail

run=${1:-} target=${2:-}
if [[ -z $run || -z $target ]]; then
  echo "error: two places are needed: bash runpod/sync.sh runs/gpt2_124m hf://buckets/USER/BUCKET" >&2
  exit 2
fi
run=${run%/} target=${target%/}
if [[ ! -d $run ]]; then
  echo "error: there is no folder $run to copy" >&2
  exit 2
fi
copy="$target/$(basename "$run")"
case $target in
  hf://*)
    hf sync "$run" "$copy" --exclude .lock --quiet
    plan=$(hf sync "$run" "$copy" --exclude .lock --ignore-times --dry-run)
    left=$(grep -c '"action": *"upload"' <<<"$plan" || true)
    ;;
  *)
    rsync --archive --partial --exclude .lock "$run/" "$copy/"
    plan=$(rsync --archive --checksum --dry-run --itemize-changes --exclude .lock "$run/" "$copy/")
    left=$(grep -c '^[<>]' <<<"$plan" || true)
    ;;
esac
if ((left)); then
  echo "error: $left files of $run are not in $copy as they are here: type the same command again" >&2
  exit 1
fi
echo "$run is in $copy, compared"
