"""After a fault during a save, a run resumes only from complete checkpoints."""

import json
from pathlib import Path

import pytest

from gpt2_repro.checkpoints.manifest import defect
from gpt2_repro.checkpoints.rotation import newest_complete
from tests.faults.runs import fill, losses, status


pytestmark = pytest.mark.faults

SAVES = ("--save_steps", 2, "--eval_steps", 2, "--per_device_train_batch_size", 4)


@pytest.mark.parametrize(("launcher", "bf16"), [(("launch", 2), "true"), (("python",), "false")], ids=["zero1", "one"])
def test_a_kill_in_a_save_costs_the_steps_since_the_last(resumes_exactly, fault, launcher, bf16: str, run) -> None:
    """A run that is killed during several saves ends like a run without faults."""
    options = (*SAVES, "--max_steps", 12, "--bf16", bf16, "--keep_checkpoints", 1, "--keep_best_checkpoint", "false")
    kills = [
        ("kill_after_the_model", 2, 0, None),
        ("kill_before_the_manifest", 4, 0, 2),
        ("kill_before_the_rename", 6, 0, 4),
        ("kill_both_before_a_shard", 6, 0, 4),
        ("kill_both_before_the_rename", 6, 0, 4),
        ("kill_in_rotation", 6, 0, 6),  # checkpoint-6 is complete, checkpoint-4 is half deleted
        # The writers complete the checkpoint of a killed trainer.
        ("kill_trainer_before_a_shard", 8, 0, 8),
        ("kill_trainer_before_the_manifest", 10, 0, 10),
    ]
    if launcher != ("python",):
        kills.insert(2, ("kill_before_a_shard", 6, 1, 4))
        kills.insert(2, ("kill_both_before_a_shard", 6, 1, 4))
    for name, step, rank, left in kills:
        code, text = fault(name, step, run, *options, rank=rank, launcher=launcher)
        assert code != 0, text
        newest, _ = newest_complete(run)
        assert (newest and newest.name) == (left and f"checkpoint-{left}"), name
    resumes_exactly(run, *options, launcher=launcher)
    assert {path.name for path in run.glob("*checkpoint-*")} == {"checkpoint-12"}
    assert not (run / "staging").exists()


@pytest.mark.parametrize("launcher", [("launch", 2), ("python",)], ids=["zero1", "one"])
def test_an_update_waits_until_the_last_save_is_copied(fault, golden, launcher, run: Path) -> None:
    options = (*SAVES, "--eval_steps", 3, "--bf16", "true", "--ema_steps", 2, "--keep_checkpoints", 0)
    assert fault("slow_memory", 1, run, *options, launcher=launcher)[0] == 0
    straight = golden(*options, launcher=launcher)
    for path in [*straight.glob("checkpoint-*/**/*.pt"), *straight.glob("checkpoint-*/*.safetensors")]:
        assert path.read_bytes() == (run / path.relative_to(straight)).read_bytes(), path


def test_a_signal_while_saving_stops_after_the_save(train, fault, golden, run) -> None:
    """After SIGTERM during a save, the save is completed before the run stops."""
    code, text = fault("term_while_saving", 4, run, *SAVES)
    assert code == 0 and status(run)["state"] == "stopped", text
    # The validation after the save is interrupted, unless it has ended. The checkpoint is not saved again.
    assert (run / "checkpoint-4").is_dir() and text.count("/checkpoint-4: ") == 1
    assert losses(train(run, *SAVES)) == losses(golden(*SAVES))


@pytest.fixture(scope="module")
def hellaswag_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with one HellaSwag item."""
    path = tmp_path_factory.mktemp("hellaswag") / "items.jsonl"
    item = {"ctx": "abc", "endings": ["de fg", "hij a", "b", "c d e"], "label": 1}
    path.write_text(json.dumps(item), encoding="utf-8")
    return path


@pytest.mark.parametrize("fault_kind", ["kill", "fail"])
@pytest.mark.parametrize("place", ["validation", "hellaswag", "sampling", "tracking"])
def test_a_fault_after_a_save_loses_no_step(
    place: str, fault_kind: str, resumes_exactly, fault, hellaswag_file, run
) -> None:
    """A crash in a validation, a sample or a tracking service costs no training step."""
    scored = ("--hellaswag_steps", 2, "--hellaswag_data", hellaswag_file, "--sample_steps", 2, "--sample_tokens", 4)
    options = (*SAVES, "--max_steps", 8, *scored)
    code, text = fault(f"{fault_kind}_in_{place}", 4, run, *options)
    if place in ("sampling", "tracking") and fault_kind == "fail":
        assert code == 0 and status(run)["state"] == "complete", text
    else:
        assert code != 0 and newest_complete(run)[0] == run / "checkpoint-4", text
    resumes_exactly(run, *options)


def test_a_disk_that_fills_up_costs_no_checkpoint(train, fault, resumes_exactly, small_disk: Path) -> None:
    """If the disk fills up during a save, the previous checkpoint stays complete."""
    run = small_disk / "run"
    train(run, *SAVES, "--stop_at_step", 2)
    filler = fill(small_disk, leave=300_000)
    # Without the check before the save, as if another program fills the disk between check and save.
    code, text = fault("no_foresight", 0, run, *SAVES)
    _, _, after = text.partition("error: ")
    assert code == 1 and "checkpoint-4" in after and "Traceback" not in after, text
    assert newest_complete(run)[0] == run / "checkpoint-2" and not (run / "staging").exists()
    filler.unlink()
    resumes_exactly(run, *SAVES)


def test_no_secret_reaches_a_file_or_the_screen(start, run) -> None:
    """Secrets in the environment are neither in the run directory nor in the output."""
    secrets = {name: f"secret of {name}" for name in ("HF_TOKEN", "WANDB_API_KEY", "RUNPOD_API_KEY")}
    command = start(run, *SAVES, "--report_to", "wandb", **secrets, WANDB_MODE="offline", launcher=("launch", 2))
    assert command.end() == 0, command.text()
    files = [path for path in [*run.rglob("*"), command.output] if path.is_file()]
    assert len(files) > 20 and any("wandb" in str(path) for path in files)
    for path in files:
        content = path.read_bytes()
        assert not [name for name, value in secrets.items() if value.encode() in content], path
    assert not list(run.rglob("training_args.bin"))
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["command"]


def test_an_error_after_the_end_does_not_change_the_state(fault, run: Path) -> None:
    code, _ = fault("fail_after_the_end", 8, run)
    assert code == 1
    assert status(run)["state"] == "complete"
    assert defect(run / "final") is None
