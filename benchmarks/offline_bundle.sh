#!/usr/bin/env bash
# Pack what benchmarks/gpu.py needs on a GPU machine without a network: wheels, 5.3M tokens and GPT-2's tokenizer.
#
#   bash benchmarks/offline_bundle.sh offline.tar.gz    # at most 32 MB
#
# GPT2_REPRO_TEST_DATA is a folder with gpt2/ (the tokenizer) and prose/*.jsonl.gz (default: ../shared/data). NANOGPT is
# a nanoGPT checkout whose model.py is also packed (default: none); then pass --nanogpt offline to gpu.py. PYTHON has
# requirements.txt installed (default: .venv/bin/python). RESULTS.md describes the use of the bundle. The GPU machine
# needs Linux on x86-64, Python 3.12, torch, accelerate and the other dependencies of transformers 5.17.
set -euo pipefail
[[ $# == 1 ]] || { echo "error: Pass the file to write, for example offline.tar.gz." >&2; exit 2; }
out=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python} data=${GPT2_REPRO_TEST_DATA:-../shared/data}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bundle=$scratch/offline
mkdir "$bundle"

# Packages that such a machine lacks, without pyarrow (55 MB). datasets, dill and multiprocess are only installed if
# the machine has pyarrow; otherwise, real_run.py reads the rows with numpy_rows.py.
wanted="transformers|hjson|pydantic|pydantic_core|annotated-types|typing-inspection|datasets|dill|multiprocess"
installed=$("$python" -m pip freeze)
grep -E "^($wanted)==" <<<"$installed" >"$scratch/wheels.txt"
"$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_17_x86_64 \
  --dest "$bundle/wheels" --requirement "$scratch/wheels.txt"
# DeepSpeed is published only as source.
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$bundle/wheels" "$(grep ^deepspeed= <<<"$installed")"

HF_HUB_OFFLINE=1 "$python" prepare_data.py recipes/gpt2_124m.yaml --data_files "$data"/prose/*.jsonl.gz \
  --tokenizer "$data/gpt2" --max_tokens 5.3e6 --validation_tokens 66_000 --dataset_dir "$bundle/data"
[[ -z ${NANOGPT:-} ]] || cp "$NANOGPT/model.py" "$bundle"

tar --create --directory "$scratch" offline | gzip -9 >"$out"
ls -l "$out"
(($(stat --format %s "$out") <= 32000000)) || { echo "error: The bundle is larger than 32 MB." >&2; exit 1; }
