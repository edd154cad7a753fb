"""The lines of a run that follows a reference: its band beside each validation, and the usual causes once."""

import types

import pytest
from transformers import TrainerControl, TrainerState

from gpt2_repro.training.fit import judge
from gpt2_repro.training.progress import ProgressBar, format_event


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    def go(reference: str | None, *losses: tuple[int, float]) -> list[str]:
        bar = ProgressBar(lambda step: 1, reference)
        args, state = types.SimpleNamespace(disable_tqdm=True, last_step=18_865), TrainerState(max_steps=18_865)
        state.is_world_process_zero = True
        bar.on_train_begin(args, state, TrainerControl())
        for step, loss in losses:
            state.global_step = step
            bar.on_log(args, state, TrainerControl(), logs={"eval_loss": loss, "eval_tokens": 10_485_760})
        return capsys.readouterr().out.splitlines()

    return go


def test_a_run_that_follows_has_the_band_beside_its_validations(say) -> None:
    assert say("llm.c", (0, 11.0), (250, 6.18), (1000, 4.331)) == [
        "step      0/18865  validation loss 11.0000 over 10,485,760 tokens",
        "step    250/18865  validation loss 6.1800 over 10,485,760 tokens · llm.c 6.149–6.209 ✓",
        "step   1000/18865  validation loss 4.3310 over 10,485,760 tokens · llm.c 4.315–4.345 ✓",
    ]


def test_the_usual_causes_are_told_once(say) -> None:
    lines = say("llm.c", (500, 5.6), (750, 4.9), (1000, 4.331))
    assert [line.rpartition(" · ")[2] for line in lines if line.startswith("step")] == [
        "llm.c 5.370–5.430 ✗ above",
        "llm.c 4.709–4.739 ✗ above",
        "llm.c 4.315–4.345 ✓",
    ]
    (told,) = [line for line in lines if not line.startswith("step")]
    assert told.startswith("validation loss 5.6000 at step 500: llm.c") and "usual causes" in told


def test_a_run_of_its_own_has_no_band(say) -> None:
    assert all("llm.c" not in line for line in say(None, (1000, 4.331)))


EVENT = {"step": 1000, "tokens": 524_288_000, "loss": 4.317, "learning_rate": 6e-4, "tokens_per_second": 1_590_000}


def test_a_line_has_what_a_person_needs_to_let_a_run_go_on() -> None:
    extra = {"grad_norm": 0.4211, "mfu": 0.545, "data_wait": 0.003, "usd": 1.3}
    assert format_event(EVENT | extra, steps_left=17_865) == (
        "524M tokens  loss 4.3170  lr 6.00e-04  norm 0.421  1,590,000 tok/s  mfu 54.5%  wait 0.3%  $1.30  1 h 38 min left"
    )
    assert format_event(EVENT, steps_left=1).endswith(" s left")
    assert format_event(EVENT).endswith("1,590,000 tok/s")
    assert format_event({"samples": 3}) == ""


@pytest.mark.parametrize(
    ("tokens", "shown"), [(0, "0"), (2048, "2.05K"), (99_999, "100K"), (1_048_576, "1.05M"), (9_890_693_120, "9.89B")]
)
def test_tokens_have_three_digits(tokens: int, shown: str) -> None:
    assert format_event(EVENT | {"tokens": tokens}).startswith(f"{shown} tokens  ")


@pytest.mark.parametrize(
    ("reference", "loss", "main", "said"),
    [
        ("llm.c", 4.331, True, "the setup learns as llm.c's runs do"),
        ("llm.c", 4.5, True, "usual causes of a loss above it"),
        ("llm.c", 4.331, False, ""),
        (None, 4.331, True, ""),
    ],
)
def test_a_run_ends_with_a_verdict(
    reference: str | None, loss: float, main: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = types.SimpleNamespace(
        eval_losses={"eval_loss": loss, "step": 1000},
        environment={"reference": reference},
        is_world_process_zero=lambda: main,
    )
    judge(trainer)
    assert said in caplog.text and bool(said) == bool(caplog.text)
    trainer.eval_losses = {}
    judge(trainer)
