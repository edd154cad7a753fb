#!/usr/bin/env bash
# Copy a run to another place and compare the copy with it: exit code 0 only where everything has arrived.
#   bash runpod/sync.sh runs/gpt2_124m hf://buckets/USER/BUCKET      the Hub's buckets; HF_TOKEN in the environment
#   bash runpod/sync.sh runs/gpt2_124m user@host:backup/             by rsync
# Every byte is compared: by the hashes that the Hub keeps, and by rsync's checksums.
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
    left=$("${PYTHON:-python}" - "$run" "${copy#hf://buckets/}" <<'END'
import sys
from pathlib import Path

from hf_xet import hash_files
from huggingface_hub import HfApi

run, (user, bucket, prefix) = Path(sys.argv[1]), sys.argv[2].split("/", 2)
there = {
    entry.path: entry.xet_hash
    for entry in HfApi().list_bucket_tree(f"{user}/{bucket}", prefix=prefix, recursive=True)
    if entry.type == "file"
}
files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
hashes = [info.hash for info in hash_files([str(path) for path in files])]
print(sum(there.get(f"{prefix}/{path.relative_to(run)}") != hash for path, hash in zip(files, hashes)))
END
    )
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
