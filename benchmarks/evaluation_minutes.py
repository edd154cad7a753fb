"""Measure how long evaluate.sh takes for two GPT-2 124M models on three tasks.

python benchmarks/evaluation_minutes.py --local_data tasks/ --tokenizer openai-community/gpt2
python benchmarks/evaluation_minutes.py --local_data tasks/ --tokenizer FOLDER --n_layer 1 --limit 20     # a quick try

Each measurement is the time of a complete `bash evaluate.sh` command. The models are untrained. This does not change
the time, because the number of tokens is the same.
"""

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


ROOT = Path(__file__).parents[1]
TASKS = ("lambada_openai", "hellaswag", "wikitext")  # evaluate.sh adds HellaSwag's completion style


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_data", required=True, type=Path, help="Folder with the tasks' jsonl files.")
    parser.add_argument("--tokenizer", required=True, help="GPT-2's tokenizer: a folder or a Hub id.")
    parser.add_argument("--n_layer", type=int, default=12, help="Layers of the models. (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="Documents per task. (default: all)")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    limit = [] if options.limit is None else ["--limit", str(options.limit)]
    with tempfile.TemporaryDirectory() as scratch:
        models = [str(Path(scratch, name)) for name in ("one", "other")]
        for seed, model in enumerate(models):
            torch.manual_seed(seed)
            GPT2LMHeadModel(GPT2Config(n_layer=options.n_layer)).save_pretrained(model)
            tokenizer.save_pretrained(model)
        print("| tasks | minutes |\n| --- | ---: |")
        for tasks in (*((task,) for task in TASKS), TASKS):
            words = [
                "bash",
                "evaluate.sh",
                models[0],
                "--baseline",
                models[1],
                "--tasks",
                *tasks,
                "--no_cache",
                *limit,
            ]
            words += ["--local_data", str(options.local_data.resolve()), "--output_dir", str(Path(scratch, "out"))]
            began = time.perf_counter()
            subprocess.run(words, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, check=True)
            print(f"| {', '.join(tasks)} | {(time.perf_counter() - began) / 60:.2f} |", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\nTwo models, {max(1, torch.cuda.device_count())} x {device}, torch {torch.__version__}, fp32, with start-up"
    )


if __name__ == "__main__":
    main()
