#!/usr/bin/env bash
# Copy a run directory to another place and compare the copy with the original. Exit code 0: all files were copied and are equal.
#   bash runpod/sync.sh runs/gpt2_124m hf://buckets/USER/BUCKET      to a bucket of the Hub; needs HF_TOKEN
#   bash runpod/sync.sh runs/gpt2_124m user@host:backup/             with rsync, into the home directory of user
#   bash runpod/sync.sh --check TARGET                               only check that TARGET can be reached
#
# The script compares the contents of all files, with the hashes of the Hub or with the checksums of rsync.
set -euo pipefail
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

run=${1:-} target=${2:-}
[[ $# == 2 && -n $target && $target != -* ]] || mistake "Pass a run directory and a target. Got: $*."
if [[ $target =~ ^hf://buckets/([^/]+/[^/]+)(/|$) ]]; then bucket=${BASH_REMATCH[1]}; fi
[[ $target != *://* || -n ${bucket:-} ]] || mistake "Unknown target $target. Use hf://buckets/USER/BUCKET, a folder, or HOST:FOLDER."
[[ $run == --check || -d $run ]] || mistake "The folder $run does not exist. Pass a run directory, such as runs/demo."
[[ -n ${bucket:-} ]] || needs rsync "Run: apt-get install rsync. For a bucket, pass hf://buckets/USER/BUCKET"
if [[ $run == --check ]]; then
  if [[ -n ${bucket:-} ]]; then
    hf buckets info "$bucket" >/dev/null || mistake "Cannot reach $bucket. To create it: hf buckets create $bucket."
  else
    rsync --archive --dry-run "$(dirname "${BASH_SOURCE[0]}")" "$target" >/dev/null || mistake "Cannot reach $target with rsync."
  fi
  exit 0
fi
run=$(cd "$run" && pwd)
copy=${target%/}/$(basename "$run")
# A folder of another run with the same name must not be replaced. Logs have no environment.json.
there=$target
[[ $target == *[:/] ]] || there+=/ # me@host: is the home directory
there+=$(basename "$run")
scratch=$(mktemp -d) files=""
trap 'rm -rf "$scratch"' EXIT
if [[ -n ${bucket:-} ]]; then
  hf buckets cp "$there/environment.json" "$scratch/environment.json" >/dev/null 2>&1 ||
    files=$(hf buckets ls "$there" -R 2>/dev/null) || :
else
  rsync "$there/environment.json" "$scratch/" 2>/dev/null || files=$(rsync --list-only "$there/" 2>/dev/null) || :
fi
if [[ -f $scratch/environment.json ]]; then
  "${PYTHON:-python}" - "$run/environment.json" "$scratch/environment.json" >/dev/null 2>&1 <<'END' || files=other
import json
import sys
from pathlib import Path

ours, theirs = (json.loads(Path(path).read_bytes())["run_identity"] for path in sys.argv[1:])
sys.exit(ours != theirs)
END
elif [[ ! -f $run/environment.json ]]; then
  files=""
fi
[[ -z $files ]] || mistake "$there has files of another run. Pass another target, or rename one of the folders."
if [[ -n ${bucket:-} && -f $run/environment.json ]]; then
  hf buckets cp "$run/environment.json" "$there/environment.json" >/dev/null # it names the owner
fi
if [[ -n ${bucket:-} ]]; then
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
else
  rsync --archive --partial --exclude .lock "$run" "$target" # rsync appends the folder's name, even after a colon
  plan=$(rsync --archive --checksum --dry-run --itemize-changes --exclude .lock "$run" "$target")
  left=$(grep -c '^[<>]' <<<"$plan" || true)
fi
if ((left)); then
  echo "error: files of $run that are missing or different in $copy: $left. Run the same command again." >&2
  exit 1
fi
say "copied $run to $copy; all copied files equal the originals"
