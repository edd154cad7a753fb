"""Provide the run directory of a small run, as train.py and evaluate.sh write it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest


BASELINE = "openai-community/gpt2"
SAMPLE = 'there was a <script>alert("king")</script> & a crown'


def change(path: Path, **values: object) -> None:
    """Set some keys of the object in a JSON file. A missing file is created."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | values), encoding="utf-8")


def add(run: Path, file: str = "metrics.jsonl", **event: object) -> None:
    """Append an event to the JSON-lines file `file` in the run directory `run`."""
    with (run / file).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(event) + "\n")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "demo")


def write_run(folder: Path, *, learning_rate: float = 1e-3, steps: int = 40) -> Path:
    """Write all files of a finished run to a new folder; the final eval_loss is 4.123."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "final").mkdir()
    (folder / "recipe.yaml").write_text(f"training:\n  learning_rate: {learning_rate}\n", encoding="utf-8")
    data = {"counts": {"train": {"tokens": 2_813_412}}, "reference_losses": {"unigram": 6.713, "bigram": 4.601}}
    plan = {"tokens_per_step": 8192, "sequence_length": 256, "micro_batch_size": 32, "num_processes": 1}
    plan |= {"gradient_accumulation_steps": 1, "max_steps": steps}
    change(folder / "environment.json", plan=plan, parameters=7_351_808, data=data, command="launch train.py")
    status: dict[str, Any] = {"state": "complete", "reason": None, "updated": "2026-01-02T03:04:05+00:00"}
    change(folder / "run_status.json", **status, step=steps, max_steps=steps, tokens=steps * 8192, seconds=252.3)
    for step in range(1, steps + 1):
        event = {"step": step, "tokens": step * 8192, "loss": 4.1 + 4 * math.exp(-step / 10)}
        event["peak_memory_gb"] = 41.27 - step / 100
        add(folder, **event, learning_rate=learning_rate, grad_norm=0.5, tokens_per_second=9000 + step, mfu=0.25)
    add(folder, step=steps // 2, tokens=steps // 2 * 8192, eval_loss=4.6)
    add(folder, step=steps, tokens=steps * 8192, eval_loss=4.123, eval_tokens=4096)
    add(folder, "samples.jsonl", step=10, prompt="Once", text="Once early words")
    add(folder, "samples.jsonl", step=steps, prompt="Once", text=f"Once {SAMPLE}")
    difference = {"value": -0.1244, "stderr": None, "verdict": "worse"}
    ours = {"value": 0.2012, "stderr": 0.0055, "difference": difference}
    values = {"demo": ours, BASELINE: {"value": 0.3256, "stderr": None}}
    row = {"task": "lambada_openai", "metric": "acc", "higher_is_better": True, "values": values}
    models = [{"name": "demo"}, {"name": BASELINE}]
    change(folder / "evaluation" / "comparison.json", baseline=BASELINE, limit=None, models=models, rows=[row])
    return folder
