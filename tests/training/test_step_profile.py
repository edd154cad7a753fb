"""A profile of one step is complete, and changes nothing in the run."""

import gzip
import json
from pathlib import Path


def losses_of(events: list[dict]) -> list[tuple[int, float, float | None]]:
    return [(event["step"], event.get("loss", 0), event.get("eval_loss")) for event in events if "step" in event]


def test_one_step_is_profiled_and_the_run_is_the_same(train, events, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--profile_step", 5, "--per_device_train_batch_size", 4)
    plain = train(tmp_path / "plain", "--per_device_train_batch_size", 4)
    assert losses_of(events(run)) == losses_of(events(plain))
    weights = [(path / "final" / "model.safetensors").read_bytes() for path in (run, plain)]
    assert weights[0] == weights[1]
    assert not list(plain.glob("*profile*"))
    assert sorted(path.name for path in run.glob("*profile*")) == ["profile-5.json.gz", "profile-5.txt"]

    trace = json.loads(gzip.decompress((run / "profile-5.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert names.count("Optimizer.step#AdamW.step") == 1
    forward_passes = [name for name in names if name == "aten::embedding"]
    assert len(forward_passes) == 2 * 2  # two micro-batches, tokens and positions
    table = (run / "profile-5.txt").read_text(encoding="utf-8")
    assert "aten::addmm" in table and "Step 5" in table


def test_a_step_that_is_not_trained_is_not_profiled(typed, finished: Path, tmp_path: Path) -> None:
    late = typed(tmp_path / "late", "--profile_step", 9)
    assert late.returncode == 2 and "--profile_step" in late.stderr
    assert not (tmp_path / "late").exists()
    (finished / "run_status.json").unlink()
    again = typed(finished, "--profile_step", 2, "--resume_from", "checkpoint-4")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "--profile_step" in again.stdout + again.stderr
    assert not list(finished.glob("*profile*"))
