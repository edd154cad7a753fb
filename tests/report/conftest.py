"""A small finished run, as train.py and evaluate.sh leave it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest


BASELINE = "openai-community/gpt2"
SAMPLE = 'there was a <script>alert("king")</script> & a crown'


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Writes a whole record into a new folder; its last validation loss is 4.123."""
    return _make_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return _make_run(tmp_path / "runs" / "demo")


def _make_run(folder: Path, *, learning_rate: float = 1e-3, steps: int = 40) -> Path:
    (folder / "evaluation").mkdir(parents=True)
    (folder / "final").mkdir()
    (folder / "recipe.yaml").write_text(
        f"data:\n  source: embedded\ntraining:\n  learning_rate: {learning_rate}\n  max_grad_norm: 1.0\n"
    )
    environment = {
        "versions": {"torch": "2.13.0"},
        "accelerator": {"kind": "cpu", "name": "x86_64", "count": 2, "peak_flops": None, "memory_bytes": None},
        "plan": {
            "tokens_per_step": 8192,
            "sequence_length": 256,
            "micro_batch_size": 8,
            "num_processes": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": steps,
        },
        "parameters": 7_351_808,
        "flops_per_token": 45_000_000,
        "precision": "fp32",
        "data": {
            "source": "embedded",
            "counts": {"train": {"documents": 5210, "tokens": 2_813_412, "rows": 10_990}},
            "reference_losses": {"unigram": 6.713, "bigram": 4.601},
        },
        "command": "accelerate launch train.py recipes/demo.yaml",
    }
    _write_json(folder / "environment.json", environment)
    status = {"state": "complete", "step": steps, "max_steps": steps, "tokens": steps * 8192, "seconds": 252.3}
    _write_json(folder / "run_status.json", status | {"reason": None, "updated": "2026-01-02T03:04:05+00:00"})
    for step in range(1, steps + 1):
        loss = 4.1 + 4 * math.exp(-step / 10)
        row = {"step": step, "tokens": step * 8192, "loss": loss, "learning_rate": learning_rate, "grad_norm": 0.5}
        _append(folder / "metrics.jsonl", row | {"tokens_per_second": 9000 + step, "mfu": 0.25})
    _append(folder / "metrics.jsonl", {"step": steps // 2, "tokens": steps // 2 * 8192, "eval_loss": 4.6})
    _append(folder / "metrics.jsonl", {"step": steps, "tokens": steps * 8192, "eval_loss": 4.123, "eval_tokens": 4096})
    _append(folder / "samples.jsonl", {"step": 10, "prompt": "Once", "text": "Once early words"})
    _append(folder / "samples.jsonl", {"step": steps, "prompt": "Once", "text": f"Once {SAMPLE}"})
    _write_json(folder / "evaluation" / "comparison.json", _comparison())
    (folder / "evaluation" / "comparison.md").write_text("table\n")
    return folder


def _comparison() -> dict[str, object]:
    """Rows of every verdict, better although smaller, and without one."""

    def row(
        task: str,
        metric: str,
        higher: bool | None,
        own: float,
        base: float,
        errors: Sequence[float | None],
        verdict: str | None,
    ) -> dict:
        return {
            "task": task,
            "metric": metric,
            "higher_is_better": higher,
            "values": {
                "demo": {"value": own, "stderr": errors[0]},
                BASELINE: {"value": base, "stderr": errors[1]},
            },
            "difference": {"demo": {"value": own - base, "stderr": errors[0], "verdict": verdict}},
        }

    return {
        "baseline": BASELINE,
        "limit": None,
        "models": [{"name": "demo"}, {"name": BASELINE}],
        "rows": [
            row("lambada_openai", "acc", True, 0.2012, 0.3256, [0.0055, 0.0065], "worse"),
            row("lambada_openai", "perplexity", False, 30.0, 40.06, [1.0, 1.42], "better"),
            row("hellaswag", "acc_norm", True, 0.3121, 0.3114, [0.0046, 0.0046], "matches"),
            row("wikitext", "word_perplexity", False, 37.5, 37.37, [None, None], "inconclusive"),
            row("group", "score", None, 0.5, 0.25, [None, None], None),
        ],
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def _append(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
