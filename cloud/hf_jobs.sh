#!/usr/bin/env bash
# Print the command that trains in a job of the Hub, with data and run in a bucket. With --yes, run it, which costs money.
# The job ends after 4 hours. Looked up in November 2026, not run by this project yet.
#   bash cloud/hf_jobs.sh USER/BUCKET GIT_ADDRESS [--yes]
#
# The data goes into the bucket first, from any machine that has prepared it:
#   hf buckets create BUCKET --private
#   hf sync data/fineweb-10bt hf://buckets/USER/BUCKET/data/fineweb-10bt
set -euo pipefail
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/../runpod/pod.sh"
bucket=${1:-} repository=${2:-}
[[ $bucket =~ ^[^/-][^/]*/[^/]+$ && -n $repository ]] ||
  mistake "pass a bucket and the address of this repository, such as USER/BUCKET https://…"
[[ $# == 2 || ($# == 3 && $3 == --yes) ]] || mistake "there is no option ${*:3}"
printf -v run 'apt-get update -qq && apt-get install -qq -y git && git clone %q gpt2 && cd gpt2' "$repository" # the image has no git
run+=" && pip install -q -r requirements.txt && python -m gpt2_repro.preflight --dist"
run+=" && python -m gpt2_repro.supervise -- accelerate launch --config_file accelerate_configs/zero1.yaml train.py"
run+=" --dataset_dir /bucket/data/fineweb-10bt --output_dir /bucket/runs/gpt2_124m"
command=(hf jobs run --flavor a100x8 --timeout 4h --secrets HF_TOKEN -v "hf://buckets/$bucket:/bucket"
  pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel bash -c "$run")
show_command "${command[@]}"
if (($# == 3)); then "${command[@]}"; else echo "Nothing was started. Pass --yes to start it." >&2; fi
