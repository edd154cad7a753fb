"""Compare plain_trainer.py with train.py, for docs/why.md.

    python benchmarks/why.py --text prose.txt --figure docs/figures/why.png

plain_trainer.py uses transformers' Trainer as common guides do. Both scripts train the same small GPT-2 with the same
tokenizer on the same text. why.py compares the losses that the two scripts report with the true losses. The true
losses are computed from the saved weights with a plain loop over rows.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from datasets import load_from_disk
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import plain_trainer  # noqa: E402


CONTEXT, ROWS, PASSES, STEPS = 256, 8, 4, 120
LITTLE = 60_000  # characters of the text whose rows make up one step
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128}
STEP = ROWS * PASSES * CONTEXT  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Plain text of a few megabytes.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"Steps of {STEP:,} tokens (default: {STEPS}).")
    parser.add_argument("--figure", type=Path, help="PNG file for a figure of three differences.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="why-") as folder:
        work = Path(folder)
        recipe, tokenizer = prepare(work, args.text, args.steps)
        plain, ours = Plain(work, args.text, tokenizer, args.steps), Ours(work, recipe, args.steps)
        found = {side.name: measure(side) for side in (plain, ours)}
        print(json.dumps(found, indent=2))
        if args.figure:
            draw(found, args.figure)


def prepare(work: Path, text: Path, steps: int) -> tuple[Path, Path]:
    """Prepare the complete text, and the start of the text, as training data.

    The rows of the start of the text make up one training step. Returns the path of a recipe and the path of the
    tokenizer's folder. The recipe trains on the complete text for `steps` steps.
    """
    data = {"source": "files", "tokenizer": "train:1024", "sequence_length": CONTEXT, "split": "hash"}
    training = {"tokens_per_step": STEP, "max_steps": steps, "per_device_train_batch_size": ROWS, "warmup_steps": 20}
    training |= {"accept_any_hardware": True, "eval_tokens": 0, "per_device_eval_batch_size": ROWS, "sample_steps": 0}
    whole = text.read_text(encoding="utf-8")
    (work / "little.txt").write_text(whole[:LITTLE], encoding="utf-8")
    for name, part in (("data", whole), ("little", whole[:LITTLE])):
        documents = work / f"{name}.jsonl"
        documents.write_text(
            "\n".join(json.dumps({"text": each}) for each in part.split("\n\n") if each), encoding="utf-8"
        )
        section = data | {"data_files": [str(documents)], "dataset_dir": str(work / name), "validation_fraction": 0.05}
        if name == "little":
            section["tokenizer"] = str(work / "data" / "tokenizer")
        (work / f"{name}.yaml").write_text(
            yaml.safe_dump({"data": section, "model": SHAPE, "training": training}), encoding="utf-8"
        )
        command = [sys.executable, "prepare_data.py", work / f"{name}.yaml"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return work / "data.yaml", work / "data" / "tokenizer"


class Plain:
    """Build commands of plain_trainer.py, and read the rows and results of its runs."""

    name = "plain_trainer.py"

    def __init__(self, work: Path, text: Path, tokenizer: Path, steps: int) -> None:
        self.work, self.text, self.tokenizer, self.steps = work, text, tokenizer, steps

    def command(self, out: Path, **changed: Any) -> list[str]:
        options = {"text": self.text, "tokenizer": self.tokenizer, "output_dir": out, "context": CONTEXT, **SHAPE}
        options |= {"batch_size": ROWS, "accumulation": PASSES, "max_steps": self.steps, "warmup_steps": 20}
        options |= {"save_steps": 0, "eval_steps": 0, "dtype": "bfloat16"} | changed
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return [
            sys.executable,
            "benchmarks/plain_trainer.py",
            *words,
            *([] if torch.cuda.is_available() else ["--use_cpu"]),
        ]

    def rows(self, *, little: bool) -> list[list[int]]:
        text = (self.work / "little.txt" if little else self.text).read_text(encoding="utf-8")
        part = slice(int(0.95 * len(text))) if little else slice(int(0.95 * len(text)), None)
        return plain_trainer.tokenize(text[part], AutoTokenizer.from_pretrained(self.tokenizer), CONTEXT)["input_ids"]

    def little(self) -> dict[str, Any]:
        return {"text": self.work / "little.txt"}

    def losses(self, out: Path) -> tuple[float, float]:
        """Return the mean training loss and the last validation loss of the run in `out`."""
        found = [
            json.loads((out / f"{name}_results.json").read_text(encoding="utf-8"))[f"{name}_loss"]
            for name in ("train", "eval")
        ]
        return found[0], found[1]

    def final(self, out: Path) -> Path:
        return out

    def is_saving(self, out: Path) -> bool:
        return any(out.glob("checkpoint-*"))


class Ours:
    """Build commands of train.py, and read the rows and results of its runs."""

    name = "train.py"

    def __init__(self, work: Path, recipe: Path, steps: int) -> None:
        self.work, self.recipe, self.steps = work, recipe, steps

    def command(self, out: Path, **changed: Any) -> list[str]:
        names = {"accumulation": None, "batch_size": "per_device_train_batch_size", "dtype": "bf16"}
        options: dict[str, Any] = {"output_dir": out}
        for key, value in changed.items():
            name = names.get(key, key)
            if name is not None:
                options[name] = str(value == "bfloat16").lower() if key == "dtype" else value
        if "batch_size" in changed:
            options["tokens_per_step"] = changed["batch_size"] * changed.get("accumulation", PASSES) * CONTEXT
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return [sys.executable, "train.py", str(self.recipe), *words]

    def rows(self, *, little: bool) -> list[list[int]]:
        folder = self.work / ("little/train" if little else "data/validation")
        return [list(map(int, row)) for row in load_from_disk(str(folder))["input_ids"]]

    def little(self) -> dict[str, Any]:
        return {"dataset_dir": self.work / "little"}

    def losses(self, out: Path) -> tuple[float, float]:
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        validated = [event["eval_loss"] for event in events if "eval_loss" in event]
        return next(event["loss"] for event in events if "loss" in event), validated[-1]

    def final(self, out: Path) -> Path:
        return out / "final"

    def is_saving(self, out: Path) -> bool:
        return any((out / "staging").glob("checkpoint-*"))


@torch.no_grad()
def true_loss(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> float:
    """Return the mean loss over the targets of all rows, with an fp32 softmax."""
    total = targets = 0.0
    for row in rows:
        # train.py's rows hold one token more than the context: every position has a target.
        ids = torch.tensor([row[:CONTEXT]])
        labels = torch.tensor(row[1 : CONTEXT + 1])
        logits = model(ids).logits[0, : len(labels)].float()
        total += float(cross_entropy(logits, labels, reduction="sum"))
        targets += len(labels)
    return total / targets


Side = Plain | Ours


def run(side: Side, out: Path, **changed: Any) -> float:
    """Run plain_trainer.py or train.py and return the time in seconds."""
    began = time.perf_counter()
    done = subprocess.run(side.command(out, **changed), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return time.perf_counter() - began


def measure(side: Side) -> dict[str, Any]:
    """Return all measurements of plain_trainer.py or train.py by name."""
    found: dict[str, Any] = {}
    trained, start = side.work / f"{side.name}-trained", side.work / f"{side.name}-start"
    run(side, trained)
    little = side.rows(little=True)
    one_step = {"batch_size": len(little), "accumulation": 1, "dropout": 0.0, "dtype": "float32", **side.little()}
    run(side, start, max_steps=1, warmup_steps=0, learning_rate=1e-12, **one_step)
    model = AutoModelForCausalLM.from_pretrained(side.final(trained), dtype="auto").eval()
    unmoved = AutoModelForCausalLM.from_pretrained(side.final(start), dtype="auto").eval()
    begun = side.work / f"{side.name}-begun"  # initial weights in the precision of the training
    run(side, begun, max_steps=1, warmup_steps=0, learning_rate=1e-12)
    before = AutoModelForCausalLM.from_pretrained(side.final(begun), dtype="auto")
    found["training loss of a step"] = round(side.losses(start)[0], 5)
    found["true, of its rows"] = round(true_loss(unmoved, little), 5)
    found["validation loss"] = round(side.losses(trained)[1], 5)
    found["true, of the saved weights"] = round(true_loss(model, side.rows(little=False)), 5)
    moved = 1 - torch.cosine_similarity(
        model.transformer.wpe.weight.detach().float(), before.transformer.wpe.weight.detach().float(), dim=1
    )
    found["last position turned (1 - cosine)"] = round(float(moved[-1]), 5)
    found["other positions, median"] = round(float(moved[:-1].median()), 5)
    gains = torch.cat(
        [weight.flatten() for name, weight in model.named_parameters() if "ln_" in name and "weight" in name]
    )
    found["LayerNorm gains that moved"] = int((gains.float() != 1).sum())
    found["LayerNorm gains"] = len(gains)
    found |= {"after a kill while saving": killed_while_saving(side)}
    found["tokens/s, fp32, without dropout"] = round(speed(side))
    return found


def speed(side: Side) -> float:
    """Return the training speed in tokens per second."""
    # The difference of two runs excludes the time before the first and after the last step.
    few, many = 20, 80
    alike = {"dtype": "float32", "dropout": 0.0, "warmup_steps": 0}
    seconds = [run(side, side.work / f"{side.name}-{steps}", max_steps=steps, **alike) for steps in (few, many)]
    return (many - few) * ROWS * PASSES * CONTEXT / (seconds[1] - seconds[0])


def killed_while_saving(side: Side) -> str:
    """Kill a run while it saves a checkpoint, and run the same command again.

    Returns "resumes" or the error message of the second command.
    """
    out = side.work / f"{side.name}-killed"
    command = side.command(out, save_steps=10, max_steps=30)
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not side.is_saving(out):
        time.sleep(0.001)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return "resumes" if done.returncode == 0 else f"fails: {(last or ['no message'])[-1][:160]}"


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw three bar charts of the measurements, with one bar for each script."""
    panels: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "Error of the reported\nvalidation loss (nats)": (
            "{:.4f}",
            lambda side: abs(side["true, of the saved weights"] - side["validation loss"]),
        ),
        "Movement of the last\nposition embedding (1 - cos)": (
            "{:.3f}",
            lambda side: side["last position turned (1 - cosine)"],
        ),
        "LayerNorm gains\nthat were trained": (
            "{:.0%}",
            lambda side: side["LayerNorm gains that moved"] / side["LayerNorm gains"],
        ),
    }
    figure = Figure(figsize=(7.6, 2.3), dpi=150, layout="constrained")
    for axes, (title, (form, value)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        heights = [value(side) for side in found.values()]
        bars = axes.bar(list(found), heights, color=["#d55e00", "#0072b2"], width=0.6)
        axes.bar_label(bars, [form.format(height) for height in heights], fontsize=9)
        axes.set_title(title, fontsize=9)
        axes.set_yticks([])
        axes.margins(y=0.2)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
