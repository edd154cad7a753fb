#!/usr/bin/env bash
# The run as a job of the Hub, which ends it at a deadline of its own; data and run lie in a bucket. Prints the command, and
# types it with --yes: from then on it costs money. Looked up in November 2026, not run by this project yet.
#   bash cloud/hf_jobs.sh USER/BUCKET GIT_ADDRESS [--yes]
# The data goes into the bucket first, from any machine that has prepared it:
#   hf buckets create BUCKET --private
#   hf sync data/fineweb-10bt hf://buckets/USER/BUCKET/data/fineweb-10bt
set -euo pipefail
bucket=${1:-} repository=${2:-}
if [[ -z $bucket || -z $repository ]]; then
  echo "error: a bucket and the address of this repository are needed: bash cloud/hf_jobs.sh USER/BUCKET https://…" >&2
  exit 2
fi
printf -v run 'apt-get update -qq && apt-get install -qq -y git && git clone %q gpt2 && cd gpt2' "$repository" # the image has no git
run+=" && pip install -q -r requirements.txt && python -m gpt2_repro.preflight --dist"
run+=" && python -m gpt2_repro.supervise -- accelerate launch --config_file accelerate_configs/zero1.yaml train.py"
run+=" --dataset_dir /bucket/data/fineweb-10bt --output_dir /bucket/runs/gpt2_124m"
command=(hf jobs run --flavor a100x8 --timeout 4h --secrets HF_TOKEN -v "hf://buckets/$bucket:/bucket"
  pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel bash -c "$run")
printf '%q ' "${command[@]}"
echo
if [[ ${3:-} == --yes ]]; then "${command[@]}"; else echo "nothing was started: add --yes to do so" >&2; fi
