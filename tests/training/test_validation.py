"""A run validates, generates samples and scores HellaSwag at the right steps.

The HellaSwag scores are the same with one and with two processes.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from gpt2_repro.training.tracking import FAILURES_ALLOWED
from gpt2_repro.training.trainer import PretrainingTrainer
from gpt2_repro.training.validation import validation_batches


def test_evaluate_refuses_another_dataset() -> None:
    for asked in ({"eval_dataset": []}, {"metric_key_prefix": "test"}):
        with pytest.raises(ValueError, match="validation_"):
            PretrainingTrainer.evaluate(None, **asked)


@pytest.mark.slow
def test_hellaswag_and_samples_at_the_due_steps(train, events, tmp_path: Path) -> None:
    endings = ["abc", "de fg", "hij a", "b c d e"]
    items = [{"ctx": " ".join(endings[: n % 4 + 1]), "endings": endings, "label": n % 4} for n in range(9)]
    hellaswag = tmp_path / "hellaswag.jsonl"
    hellaswag.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    options = ("--max_steps", 6, "--eval_steps", 2, "--hellaswag_steps", 4, "--hellaswag_data", hellaswag)
    options += ("--sample_steps", 3, "--learning_rate", 1e-30)
    one = train(tmp_path / "one", *options)
    two = train(tmp_path / "two", *options, "--per_device_train_batch_size", 4, launcher=("launch", 2))
    validated = [{event["step"]: event for event in events(run) if "eval_loss" in event} for run in (one, two)]
    assert list(validated[0]) == [0, 2, 4, 6] and "hellaswag_acc" not in validated[0][2]
    scores = [(its[step]["hellaswag_acc"], its[step]["hellaswag_items"]) for its in validated for step in (0, 4, 6)]
    assert len(set(scores)) == 1 and scores[0][1] == 9  # the weights do not change
    samples = [json.loads(line) for line in (one / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [sample["step"] for sample in samples] == [0, 4, 6]
    status = json.loads((one / "run_status.json").read_text(encoding="utf-8"))
    assert sum(status["time_breakdown"].values()) == pytest.approx(status["seconds"], abs=0.5)
    assert all(status["time_breakdown"][name] > 0 for name in ("startup", "training", "validation", "saving"))


def test_sample_from_infinite_logits_does_not_end_the_run(typed, events, tmp_path: Path) -> None:
    """A sample from logits that are not finite does not end the run."""
    # In an earlier version, the sampler raised an exception before UpdateGuard ended the run. The run then ended with
    # a traceback instead of the state `diverged`, at the same step after every restart.
    run, words = tmp_path / "run", ("--config_overrides", "initializer_range=1e38")
    done = typed(run, *words, "--eval_steps", 1, "--max_steps", 12, "--sample_steps", 1)
    status = json.loads((run / "run_status.json").read_text(encoding="utf-8"))
    assert (done.returncode, status["state"]) == (1, "diverged")
    assert done.stdout.count("TextSampler") == FAILURES_ALLOWED and "Traceback" not in done.stderr
    assert "eval_loss is not finite at step 0" in done.stdout + done.stderr  # the loss is logged too
    assert not math.isfinite([event["eval_loss"] for event in events(run) if "eval_loss" in event][1])
    assert not (run / "samples.jsonl").exists()


def test_bad_hellaswag_file_is_refused_and_missing_hub_is_ignored(typed, events, tmp_path: Path) -> None:
    run, options = tmp_path / "run", ("--hellaswag_steps", 4, "--max_steps", 4)
    (tmp_path / "bad.jsonl").write_text('{"ctx": "abc", "label": 0}\n', encoding="utf-8")
    done = typed(run, *options, "--hellaswag_data", tmp_path / "bad.jsonl")
    assert done.returncode == 2 and "endings" in done.stderr and not run.exists()
    assert typed(run, *options).returncode == 0
    assert [event["step"] for event in events(run) if "eval_loss" in event] == [0, 4]
    assert not any("hellaswag_acc" in event for event in events(run))


@pytest.mark.parametrize("fixed_length", [None, 8])
@pytest.mark.parametrize("rows", [1, 5, 8, 9])
def test_processes_make_equal_passes_and_count_each_row_once(rows: int, fixed_length: int | None) -> None:
    """All processes make equally many forward passes, and each row is counted once."""
    table = Dataset.from_dict({"input_ids": [list(range(n, n + 5)) for n in range(rows)]}).with_format("numpy")
    cut = {"size": 2, "fixed_length": fixed_length}
    shares = [list(validation_batches(table, process=process, processes=3, **cut)) for process in range(3)]
    # With sharded weights, a process with one more pass would wait forever for the other processes.
    assert {len(share) for share in shares} == {-(-rows // 6)}
    counted = [batch["labels"][batch["labels"] != -100] for share in shares for batch, _ in share]
    assert sorted(torch.cat(counted).tolist()) == sorted(n + label for n in range(rows) for label in range(1, 5))
    assert sum(targets for share in shares for _, targets in share) == 4 * rows
