"""The plan of a run whose rows are grouped by length: derived, sufficient, and refused where it cannot be."""

import re
from typing import Any

import pytest

from gpt2_repro.batch_plan import plan_batches, plan_by_length, plan_run
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError
from gpt2_repro.training.arguments import TrainingSection


ROWS = DataArguments(sequence_length=512, packing="wrap", min_length=256)


def asked(**changed: Any) -> TrainingSection:
    return TrainingSection(**{"train_sampling_strategy": "group_by_length"} | changed)


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 17), (2, 9), (4, 5), (8, 3)])
def test_accumulation_and_steps_of_rows_by_length(processes: int, accumulation: int) -> None:
    plan = plan_run(asked(), ROWS, num_processes=processes)
    # 1 + ln 2 + (524,288 + 511) / (32,768 * 64 / 65) = 17.96
    assert plan.gradient_accumulation_steps == accumulation and plan.passes_per_step == processes * accumulation
    assert plan.positions_per_pass == 32_768 and plan.by_length
    assert (plan.max_steps, plan.total_tokens) == (18_865, 9_890_693_120)


def test_only_rows_by_length_need_not_divide() -> None:
    words = {"tokens_per_step": 524_288, "sequence_length": 512, "micro_batch_size": 64, "num_processes": 8}
    plan = plan_run(asked(train_sampling_strategy="random"), ROWS, num_processes=8)
    assert plan == plan_batches(**words, max_steps=18_865) and not plan.by_length


def test_what_does_not_fit_names_both() -> None:
    with pytest.raises(UserError, match="group_by_length .*--torch_compile"):
        plan_run(asked(torch_compile=True), ROWS, num_processes=1)
    assert plan_run(asked(torch_compile=False), ROWS, num_processes=1)
    with pytest.raises(UserError, match="524,287 .* 524,288"):
        plan_run(asked(), ROWS, num_processes=1, epoch_targets=524_287)
    assert plan_run(asked(), ROWS, num_processes=1, epoch_targets=524_288)


@pytest.mark.parametrize(("tokens", "rows", "processes"), [(4096, 2, 8), (524_288, 1, 1), (100, 4, 1), (2048, 4, 1)])
def test_a_step_with_too_few_rows_names_choices_that_work(tokens: int, rows: int, processes: int) -> None:
    layout = {"longest": 512, "shortest": 1, "num_processes": processes, "max_steps": 5}
    with pytest.raises(UserError) as error:
        plan_by_length(**layout, tokens_per_step=tokens, micro_batch_size=rows)
    choices = re.findall(r"--(\w+) (\d+)", str(error.value).partition(": use ")[2])
    assert choices
    for option, value in choices:
        mended = {"tokens_per_step": tokens, "micro_batch_size": rows}
        mended[option.replace("per_device_train_batch_size", "micro_batch_size")] = int(value)
        assert plan_by_length(**layout, **mended).passes_per_step <= mended["tokens_per_step"] // 512
