"""Compare evaluate.sh on the standard suite with one call of lm_eval per model, in CPU seconds and in scores.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py ../shared/data --share 0.005

Both score two GPT-2 124M with random weights on the CPU, from local files with this share of the documents of each
task. PIQA, ARC-Easy, SciQ and BLiMP are made from HellaSwag's text: questions with two or four options of up to four
words (PIQA: an ending), and pairs of sentences of eight words that differ in one word.
"""

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import cpu_seconds, print_columns, print_header, print_row
from gpt2_repro.evaluation.tasks import find_local_files, write_task_files
from gpt2_repro.recipe import SUITES


ROOT = Path(__file__).parents[1]
DOCUMENTS = {"hellaswag": 10_042, "piqa": 1838, "arc_easy": 2376, "sciq": 1000, "blimp": 67_000}
DOCUMENTS |= {"lambada_openai": 5153, "wikitext": 62}


def write_data(source: Path, folder: Path, share: float) -> None:
    """Write a share of the documents of each task of the suite."""
    counts = {name: max(1, round(share * count)) for name, count in DOCUMENTS.items()}
    with gzip.open(source / "hellaswag/hellaswag_val.jsonl.gz", "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in itertools.islice(file, max(counts.values()))]
    made = {"hellaswag": items, "piqa": [], "arc_easy": [], "sciq": [], "blimp": []}
    for item in items:
        one, two, *_ = item["endings"]
        made["piqa"].append({"goal": item["ctx"], "sol1": one, "sol2": two, "label": 0})
        options = [" ".join(ending.split()[:4]) for ending in item["endings"]]
        choices = {"text": options, "label": ["A", "B", "C", "D"]}
        made["arc_easy"].append({"question": item["ctx"], "choices": choices, "answerKey": "B"})
        answers = {"correct_answer": options[0]} | {f"distractor{n}": options[n] for n in (1, 2, 3)}
        made["sciq"].append({"support": f"{item['ctx']} {two}", "question": one, **answers})
        good = one.split()[:8]
        bad = [*good[:-3], two.split()[0], *good[-2:]]
        made["blimp"].append({"sentence_good": " ".join(good), "sentence_bad": " ".join(bad)})
    for name, rows in made.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows[: counts[name]]), encoding="utf-8"
        )
    for name, path in (
        ("lambada_openai", "lambada/lambada_test"),
        ("wikitext", "wikitext/wikitext2_validation_pages"),
    ):
        lines = (source / f"{path}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[: counts[name]]), encoding="utf-8")


def write_models(folder: Path, tokenizer: Path, **sizes: int) -> list[Path]:
    """Write two GPT-2 with random weights, and return their folders."""
    models = [folder.with_name(f"{folder.name}{seed}") for seed in (1, 2)]
    for seed, model in enumerate(models, start=1):
        torch.manual_seed(seed)
        GPT2LMHeadModel(GPT2Config(initializer_range=0.05, **sizes)).save_pretrained(model)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(model)
    return models


def cpu_seconds_of(*words: object) -> float:
    before = cpu_seconds()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}
    subprocess.run([str(word) for word in words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return cpu_seconds() - before


def scores_of(path: Path) -> dict[str, float]:
    found = {}
    for task, entries in json.loads(path.read_text(encoding="utf-8"))["results"].items():
        found |= {
            f"{task} {key}": value for key, value in entries.items() if key.endswith(",none") and "_stderr" not in key
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with gpt2/, hellaswag/, lambada/ and wikitext/")
    parser.add_argument("--share", type=float, default=0.005, help="of the documents of each task")
    options = parser.parse_args()
    print_header("torch", "transformers", "lm_eval")
    print_columns("documents", "evaluate.sh", "lm_eval", "ratio", "scores", "largest relative difference")
    with tempfile.TemporaryDirectory() as scratch:
        data, tasks = Path(scratch, "data"), SUITES["standard"]
        data.mkdir()
        write_data(options.data, data, options.share)
        models = write_models(Path(scratch, "model"), options.data / "gpt2")
        write_task_files(find_local_files(data, tasks), Path(scratch, "tasks"))
        words = ["--suite", "standard", "--local_data", data, "--device", "cpu", "--output_dir", Path(scratch, "ours")]
        ours = cpu_seconds_of("bash", ROOT / "evaluate.sh", models[0], "--baseline", models[1], "--no_cache", *words)
        stock, differences = 0.0, []
        for model in models:
            words = ["--model_args", f"pretrained={model},dtype=float32,max_length=1024", "--tasks", ",".join(tasks)]
            words += ["--include_path", Path(scratch, "tasks"), "--batch_size", 4, "--device", "cpu"]
            output = Path(scratch, f"stock-{model.name}.json")
            command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", *words, "--output_path", output]
            stock += cpu_seconds_of(*command)
            (written,) = Path(scratch).glob(f"stock-{model.name}*.json")
            theirs = scores_of(written)
            for path in Path(scratch, "ours/lm_eval").glob(f"*{model.name}/*.json"):
                scores = scores_of(path).items()  # also of a task that stock lm-eval does not have
                differences += [abs(value / theirs[key] - 1) for key, value in scores if theirs.get(key)]
        seconds = [f"{ours:.0f} CPU s", f"{stock:.0f} CPU s", f"{stock / ours:.2f}"]
        print_row(f"{options.share:.1%}", *seconds, len(differences), f"{max(differences):.1e}")


if __name__ == "__main__":
    main()
