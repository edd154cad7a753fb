"""The timeline at the top of training/trainer.py is what happens in a step."""

import re
from pathlib import Path

from gpt2_repro.training import trainer


# Methods that are called at a start, once per epoch, while a checkpoint is written, or for the record of a run.
NOT_IN_A_STEP = {
    *("restore", "settle", "record", "record_engine", "_record_startup", "_run_epoch"),
    *("create_scheduler", "get_train_dataloader", "_init_training_state", "_prepare_for_training", "_saver"),
    *("_write_checkpoint", "_gather_weights", "_save_weights", "_save_optimizer"),
}


def documented() -> list[str]:
    """Return the methods in the timeline, in its order."""
    text = trainer.__doc__ or ""
    return re.findall(r"\b[A-Z]\w+\.\w+", text.partition("\n\n    ")[2])


def steps_in(path: Path) -> list[list[str]]:
    """Return the recorded calls of each step."""
    steps: list[list[str]] = []
    for call in path.read_text(encoding="utf-8").splitlines():
        if call == "PretrainingTrainer.get_batch_samples":
            steps.append([])
        if steps:
            steps[-1].append(call)
    return steps


def test_a_step_with_a_save_a_validation_and_a_stop_follows_the_timeline(type_warm, tiny_recipe, tmp_path) -> None:
    words = ("--output_dir", tmp_path / "run", "--stop_at_step", 2, "--eval_steps", 2, "--logging_steps", 1)
    words += ("--ema_steps", 3, "--per_device_train_batch_size", 4, "--sample_steps", 2, "--sample_tokens", 4)
    words += ("--profile_step", 2)
    done = type_warm("python", "tests/training/timeline_train.py", tiny_recipe, *words, CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first, last = steps_in(tmp_path / "calls")
    in_order = list(dict.fromkeys(last))
    timeline = documented()
    assert len(timeline) == len(set(timeline)) > 30
    assert [call for call in in_order if call in timeline] == timeline
    of_trainer = {f"PretrainingTrainer.{name}" for name in NOT_IN_A_STEP}
    once = {"StepControl.on_prediction_step", "Watchdog.on_prediction_step", "Watchdog.on_evaluate"}
    ends = {call for call in in_order if call.endswith(("_train_end", "_epoch_end", "on_save"))}
    assert set(in_order) - set(timeline) <= of_trainer | once | ends
    assert set(first) - set(timeline) <= of_trainer | once | ends
