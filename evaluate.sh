#!/usr/bin/env bash
# Score checkpoints and a baseline with lm-evaluation-harness, and print one comparison table.
# All models are scored under the same settings.
#   bash evaluate.sh runs/gpt2_124m                                       # its final/, and openai-community/gpt2
#   bash evaluate.sh runs/gpt2_124m/checkpoint-5000 runs/gpt2_124m --tasks hellaswag --device cuda:1
#   bash evaluate.sh runs/demo --local_data data/demo --tasks last_word document_perplexity --baseline untrained
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # if started as `sh evaluate.sh`
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python3
if [[ -z "${VIRTUAL_ENV:-}" && -x "$root/.venv/bin/python" ]]; then python="$root/.venv/bin/python"; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$python}" -m gpt2_repro.evaluation "$@"
