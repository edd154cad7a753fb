#!/usr/bin/env bash
# Print the command that trains GPT-2 124M in a job of the Hugging Face Hub.
# With --yes, also start this job, which costs money.
#   bash cloud/hf_jobs.sh USER/BUCKET GIT_ADDRESS [--yes]
#
# The run directory is on the disk of the job, because a mounted bucket guarantees no locks and no atomic renames. Each
# checkpoint is copied to the bucket (--sync_to). If you start the job again, it continues from the newest copy. The job
# ends after 4 hours, the training half an hour earlier. The options are those of November 2026.
# Copy the prepared data to the bucket first:
#   hf buckets create BUCKET --private
#   hf sync data/fineweb-10bt hf://buckets/USER/BUCKET/data/fineweb-10bt
set -euo pipefail
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/../runpod/pod.sh"
bucket=${1:-} repository=${2:-}
[[ $bucket =~ ^[[:alnum:]_.][[:alnum:]_.-]*/[[:alnum:]_.-]+$ && -n $repository ]] || # becomes part of a shell command
  mistake "Pass a bucket and the git address of this repository, such as USER/BUCKET https://example.org/gpt2.git."
[[ $# == 2 || ($# == 3 && $3 == --yes) ]] || mistake "Unknown option ${*:3}."
data="--dataset_dir /bucket/data/fineweb-10bt"
printf -v run 'apt-get update -qq && apt-get install -qq -y git && git clone %q gpt2 && cd gpt2' "$repository" # the image does not contain git
run+=" && pip install -q -r requirements.txt && python -m gpt2_repro.preflight --dist $data"
run+=" && python -m gpt2_repro.supervise -- accelerate launch --config_file accelerate_configs/zero1.yaml train.py"
run+=" $data --max_hours 3.5 --sync_to hf://buckets/$bucket/runs/gpt2_124m"
command=(hf jobs run --flavor a100x8 --timeout 4h --secrets HF_TOKEN -v "hf://buckets/$bucket:/bucket"
  pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel bash -c "$run")
show_command "${command[@]}"
if (($# == 3)); then "${command[@]}"; else echo "Nothing was started. Pass --yes to start this job." >&2; fi
