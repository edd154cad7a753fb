"""Scores equal those of stock lm_eval."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.harness import evaluate_model
from gpt2_repro.evaluation.reading import read_scores
from gpt2_repro.evaluation.tasks import write_task_files
from tests.evaluation.conftest import write_rows


TASKS = ["last_word", "document_perplexity"]
SETTINGS = EvaluationSettings(max_length=64, batch_size=4, seed=1234, device="cpu", limit=None)


@pytest.fixture
def folder(model, tokenizer, prose, tmp_path: Path) -> Path:
    """A folder with a saved model (model/) and task files (tasks/)."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "validation.jsonl"
    write_rows(data, ({"text": document} for document in prose))
    write_task_files(dict.fromkeys(TASKS, data), tmp_path / "tasks")
    return tmp_path


@pytest.mark.slow
def test_scores_equal_those_of_stock_lm_eval(model, tokenizer, folder: Path) -> None:
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    words += ["--model_args", f"pretrained={folder / 'model'},dtype=float32,max_length=64", "--seed", "1234"]
    words += ["--tasks", *TASKS, "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")]
    subprocess.run(words, check=True, capture_output=True)
    (path,) = (folder / "out").glob("*/results_*.json")
    stock = json.loads(path.read_text(encoding="utf-8"))["results"]
    for task in TASKS:
        results, samples = evaluate_model(model, tokenizer, task, folder / "tasks", SETTINGS)
        ours = results["results"][task]
        assert ours.keys() == stock[task].keys()
        for key in ours.keys() - {"acc_stderr,none", "perplexity_stderr,none"}:
            number = stock[task][key]
            assert ours[key] == (pytest.approx(number, rel=1e-6) if isinstance(number, float) else number), key
        for metric in read_scores(results, samples, tokenizer):
            if isinstance(error := stock[task].get(f"{metric.name}_stderr,none"), float):
                assert metric.stderr == (error if metric.name == "acc" else pytest.approx(error, rel=0.05))
