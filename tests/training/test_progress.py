"""The lines of a run, with the band of the reference that it follows, and the usual causes once."""

import types

import pytest
from transformers import TrainerControl, TrainerState

from gpt2_repro.run_record.environment import Environment
from gpt2_repro.training.callbacks import ProgressBar, format_event
from gpt2_repro.training.fit import judge


@pytest.mark.parametrize(("reference", "bands"), [("llm.c", ["", "✗ above", "✗ above", "✓"]), (None, [""] * 4)])
def test_the_band_stands_beside_each_validation_and_the_causes_are_told_once(reference, bands: list, capsys) -> None:
    bar = ProgressBar(lambda step: 1, reference)
    args, state = types.SimpleNamespace(disable_tqdm=True, last_step=18_865), TrainerState(max_steps=18_865)
    state.is_world_process_zero = True
    bar.on_train_begin(args, state, TrainerControl())
    for state.global_step, loss in ((0, 11.0), (500, 5.6), (750, 4.9), (1000, 4.331)):
        bar.on_log(args, state, TrainerControl(), logs={"eval_loss": loss, "eval_tokens": 10_485_760})
    lines = capsys.readouterr().out.splitlines()
    validations = [line for line in lines if line.startswith("step")]
    for line, loss, band in zip(validations, ("11.0000", "5.6000", "4.9000", "4.3310"), bands, strict=True):
        assert loss in line and "10,485,760" in line and line.endswith(band) and ("llm.c" in line) == bool(band)
    assert len(lines) - len(validations) == (reference is not None)


def test_a_line_has_what_a_person_needs_to_let_a_run_go_on() -> None:
    event = {"step": 1000, "tokens": 524_288_000, "loss": 4.317, "learning_rate": 6e-4, "tokens_per_second": 1_590_000}
    extra = {"grad_norm": 0.4211, "mfu": 0.545, "data_wait": 0.003, "usd": 1.3}
    line = format_event(event | extra, steps_left=17_865)
    for told in ("524,288,000", "4.3170", "6.00e-04", "0.421", "1,590,000", "54.5%", "0.3%", "$1.30", "1 h 38 min"):
        assert told in line
    assert format_event({"samples": 3}) == "" and "left" not in format_event(event)


def test_a_run_ends_with_a_verdict(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for reference, told in (("llm.c", 1), (None, 1)):
        losses = {"eval_loss": 4.331, "step": 1000}
        judge(types.SimpleNamespace(eval_losses=losses, environment=Environment(reference=reference)))
        assert len(caplog.records) == told
