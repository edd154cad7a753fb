"""Run two commits on this machine and compare all their numbers bit for bit.

    python dev/compare_commits.py main~5                    compare main~5 with the working tree
    python dev/compare_commits.py main~5 main --only train evaluate

The script compares the hashes of prepared folders, the output of `train.py --dry_run` for every recipe, and the
evaluation scores. It also trains with several launchers and options (LAYOUTS), stops and resumes each run, and compares
losses, gradient norms, learning rates, final weights and exports. The script takes about 15 minutes on 2 cores. The exit code is 1 if anything differs.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


ROOT = Path(__file__).parents[1]
Facts = dict[str, Any]

RECIPE = {
    "data": {"source": "files", "sequence_length": 32, "tokenizer": "train:300", "split": "hash", "validation_fraction": 0.1},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "pad_vocab_to_multiple_of": 64},
    "training": {
        **{"tokens_per_step": 256, "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-2},
        **{"warmup_steps": 3, "use_cpu": True, "bf16": False, "eval_tokens": 0, "eval_steps": 4, "logging_steps": 1},
        **{"save_steps": 4, "sample_tokens": 0, "dataloader_num_workers": 0, "per_device_eval_batch_size": 4},
    },
    "evaluation": {"tasks": ["last_word", "document_perplexity"], "baseline": "untrained"},
}  # fmt: skip
# Options of prepare_data.py by name of the prepared folder.
PREPARED: dict[str, list[str]] = {
    "concat": ["--validation_text"],
    "wrap": ["--packing", "wrap", "--min_length", "4"],
    "head": ["--split", "head", "--validation_tokens", "500"],
    "char": ["--tokenizer", "char", "--separator", "none"],
    "after": ["--separator", "after", "--num_proc", "1"],
}


@dataclass(frozen=True)
class Layout:
    """A run that is compared.

    Attributes:
        launcher: `python`, `torchrun` or the name of a file in accelerate_configs/.
        options: options of train.py.
        data: name of the prepared folder.
        script: the script that is started, relative to the repository.
    """

    launcher: str
    options: str = ""
    data: str = "concat"
    script: str = "train.py"


# The script that lets a CPU train in fp16.
FP16_SCRIPT = "tests/training/fp16_train.py"
LAYOUTS = {
    "one": Layout("python", "--per_device_train_batch_size 8"),
    "accumulated": Layout("python"),
    "ddp": Layout("torchrun"),
    "zero1": Layout("zero1"),
    "zero2": Layout("zero2"),
    "zero3": Layout("zero3"),
    "fsdp2": Layout("fsdp2"),
    "dropout": Layout("zero1", "--dropout 0.1 --seed 7"),
    "muon": Layout("torchrun", "--optim muon"),
    "average": Layout("zero1", "--ema_steps 4"),
    "fp16": Layout("zero1", "--precision fp16", script=FP16_SCRIPT),
    "fp16 one": Layout("python", "--precision fp16", script=FP16_SCRIPT),
    "bf16": Layout("zero1", "--precision bf16"),
    "schedule": Layout("python", "--lr_scheduler_type warmup_stable_decay --max_grad_norm 0.1"),
    "wrap": Layout("torchrun", data="wrap"),
    "documents": Layout("python", "--document_mask"),
    "llama": Layout("python", "--model_type llama"),
    "mixtral": Layout("zero1", "--model_type mixtral --config_overrides num_key_value_heads=2,num_local_experts=4"),
}
LOGGED = ("loss", "grad_norm", "learning_rate", "tokens", "step_tokens", "eval_loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="Commit with the expected numbers.")
    parser.add_argument("head", nargs="?", help="Commit to check. (default: the working tree)")
    parser.add_argument("--only", nargs="+", choices=("prepare", "plan", "train", "evaluate"), help="(default: all)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        inputs = write_inputs(Path(scratch, "inputs"))
        sides = []
        for name, commit in (("base", args.base), ("head", args.head)):
            with checked_out(commit, Path(scratch, name)) as tree:
                sides.append(measure(tree, inputs, Path(scratch, f"{name}-output"), args.only))
    base, head = sides
    differing = [key for key in sorted(base.keys() | head.keys()) if repr(base.get(key)) != repr(head.get(key))]
    for key in differing:
        print(f"DIFFERS {key}\n  base {shown(base.get(key))}\n  head {shown(head.get(key))}")
    for key in sorted(base.keys() & head.keys()):
        if base[key] == head[key] and str(base[key]).startswith("exit code"):
            print(f"FAILS ON BOTH {key}\n  {shown(base[key])}")
    print(f"{len(base.keys() & head.keys())} values compared, {len(differing)} differ")
    sys.exit(bool(differing))


def write_inputs(folder: Path) -> Path:
    """Write the text, the recipes and the model that both commits use."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder.mkdir()
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghij", k=source.randint(2, 6))) for _ in range(80)]
    texts = [" ".join(source.choices(words, k=source.randint(20, 200))) for _ in range(120)]
    for name, part in (("a", texts[:50]), ("b", [*texts[50:], "", "naïve <|endoftext|> 日本語 🙂"])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8"
        )
    data = {"data_files": [str(folder / "a.jsonl"), str(folder / "b.jsonl")]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | {"data": RECIPE["data"] | data}), encoding="utf-8")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=300)).save_pretrained(
        folder / "model"
    )
    return folder


@contextlib.contextmanager
def checked_out(commit: str | None, folder: Path) -> Iterator[Path]:
    """Yield the path of a checkout of `commit`, or of the working tree if it is None."""
    if commit is None:
        yield ROOT
        return
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)


def measure(tree: Path, inputs: Path, output: Path, only: list[str] | None) -> Facts:
    """Run all commands in the checkout `tree` and return the measured values by name."""
    output.mkdir()
    facts: Facts = {}
    # Two commands run at a time, with one thread each. Training needs the prepared folders, and evaluation needs
    # the tokenizer of one of them.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, found in pool.map(lambda name: (name, prepare(tree, inputs, output, name)), PREPARED):
            facts |= (
                {f"prepare {name}: {key}": value for key, value in found.items()} if wanted("prepare", only) else {}
            )
        jobs = []
        if wanted("plan", only):
            jobs += [pool.submit(plan, tree, recipe.name) for recipe in sorted((tree / "recipes").glob("*.yaml"))]
        if wanted("train", only):
            jobs += [pool.submit(train, tree, inputs, output, name) for name in LAYOUTS]
        if wanted("evaluate", only):
            jobs += [pool.submit(evaluate, tree, inputs, output)]
        for number, job in enumerate(concurrent.futures.as_completed(jobs), start=1):
            facts |= job.result()
            print(
                f"\r{output.name}: {number} of {len(jobs)}",
                end="\n" if number == len(jobs) else "",
                file=sys.stderr,
                flush=True,
            )
    return facts


def wanted(kind: str, only: list[str] | None) -> bool:
    return only is None or kind in only


def run(tree: Path, *words: object) -> str:
    """Run a command in the checkout `tree` with one thread and return its output.

    If the command fails, the result begins with "exit code".
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        [str(word) for word in words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    return f"exit code {done.returncode}: {done.stderr[-2000:]}" if done.returncode else done.stdout


def prepare(tree: Path, inputs: Path, output: Path, name: str) -> Facts:
    """Prepare a data folder, and return the hashes and counts in its manifest."""
    options = [option.format(inputs=inputs) for option in PREPARED[name]]
    printed = run(
        tree, sys.executable, "prepare_data.py", inputs / "tiny.yaml", "--dataset_dir", output / name, *options
    )
    if not (output / name / "manifest.json").is_file():
        return {"failed": printed}
    manifest = json.loads((output / name / "manifest.json").read_text(encoding="utf-8"))
    return {
        key: manifest[key]
        for key in ("sha256", "counts", "shards", "tokenizer_sha256", "largest_id")
        if key in manifest
    }


def plan(tree: Path, recipe: str) -> Facts:
    """Return the output of `train.py --dry_run` for a recipe."""
    return {
        f"plan {recipe}": run(
            tree, sys.executable, "train.py", f"recipes/{recipe}", "--dry_run", "--use_cpu", "--bf16", "false"
        )
    }


def train(tree: Path, inputs: Path, output: Path, name: str) -> Facts:
    """Train and export a run, and return its logged numbers and hashes of its final weights and exports."""
    layout = LAYOUTS[name]
    folder = output / f"run-{name.replace(' ', '-')}"
    words = [*launcher_words(layout.launcher), layout.script, inputs / "tiny.yaml"]
    words += ["--dataset_dir", output / layout.data, "--output_dir", folder, *layout.options.split()]
    if layout.data == "wrap":
        words += ["--packing", "wrap", "--min_length", "4"]
    # Stop after step 5, and resume with the same command.
    for printed in (run(tree, *words, "--stop_at_step", 5), run(tree, *words)):
        if printed.startswith("exit code"):
            return {f"train {name}: failed": printed}
    facts: Facts = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        for key in LOGGED:
            if key in event:
                facts[f"train {name}: step {event['step']} {key}"] = event[key]
    facts[f"train {name}: final weights"] = weights_hash(folder / "final" / "model.safetensors")
    if name == "one":
        facts |= export(tree, folder)
    return facts


def launcher_words(launcher: str) -> list[object]:
    """Return the words in front of the script, for one process or two."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    words = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{launcher}.yaml",
    ]
    return [*words, "--main_process_port", 0, "--num_processes", 2]


def export(tree: Path, folder: Path) -> Facts:
    """Export a finished run, and return hashes of the weights of the folder and of llm.c's file."""
    plain = folder / "plain"
    llmc = folder / "model.bin"
    for target in (plain, llmc):
        printed = run(tree, sys.executable, "-m", "gpt2_repro.export", folder, target)
        if printed.startswith("exit code"):
            return {"export: failed": printed}
    return {
        "export: folder": weights_hash(plain / "model.safetensors"),
        "export: llm.c": hashlib.sha256(llmc.read_bytes()).hexdigest(),
    }


def weights_hash(path: Path) -> str:
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        for key in sorted(file.keys()):
            tensor = file.get_tensor(key)
            digest.update(f"{key} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def evaluate(tree: Path, inputs: Path, output: Path) -> Facts:
    """Return the scores of the model from write_inputs and of the untrained baseline."""
    folder = output / "model"
    folder.mkdir()
    for path in [*(inputs / "model").iterdir(), *(output / "concat" / "tokenizer").iterdir()]:
        (folder / path.name).write_bytes(path.read_bytes())
    words = [
        "--local_data",
        output / "concat",
        "--tasks",
        "last_word",
        "document_perplexity",
        "--device",
        "cpu",
        "--no_cache",
    ]
    printed = run(
        tree, "bash", "evaluate.sh", folder, *words, "--baseline", "untrained", "--output_dir", output / "evaluation"
    )
    if printed.startswith("exit code"):
        return {"evaluate: failed": printed}
    rows = json.loads((output / "evaluation" / "comparison.json").read_text(encoding="utf-8"))["rows"]
    facts: Facts = {}
    for row in rows:
        for number, (model, score) in enumerate(row["values"].items()):
            # Until 82f91990, the differences of all models were in the row.
            difference = row.get("difference", {}).get(model) or score.get("difference")
            name = f"evaluate {row['task']} {row['metric']} {number}"
            for key in ("value", "stderr"):
                facts[f"{name}: {key}"] = score[key]
                if difference is not None:
                    facts[f"{name}: difference {key}"] = difference[key]
    return facts


def shown(value: Any) -> str:
    return str(value).strip()[-600:]


if __name__ == "__main__":
    main()
