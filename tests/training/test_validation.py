"""A run validates, generates samples and scores HellaSwag at the right steps.

The HellaSwag scores are the same with one and with two processes.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.report.plots import DrawnSetting, draw_loss
from gpt2_repro.report.read import Run
from gpt2_repro.training.samples import EMPTY, TextSampler
from gpt2_repro.training.tracking import FAILURES_ALLOWED
from gpt2_repro.training.validation import validation_batches
from tests.faults.runs import status
from tests.training.by_hand import mean_nll, rows_of, targets_of


@pytest.mark.slow
def test_hellaswag_and_samples_at_the_due_steps(train, events, tmp_path) -> None:
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
    assert all(status(one)["time_breakdown"][name] > 0 for name in ("startup", "training", "validation", "saving"))


@pytest.mark.parametrize(("text", "shown"), [(" \n", EMPTY), ("", EMPTY), ("one\ntwo", "one two")])
def test_an_empty_sample_is_named(tmp_path, monkeypatch, capsys, text: str, shown: str) -> None:
    due = SimpleNamespace(is_due=lambda step, every: True)
    run = SimpleNamespace(samples=tmp_path / "samples.jsonl")
    sampler = TextSampler(SimpleNamespace(processing_class=None, when=due, run=run))
    monkeypatch.setattr(sampler, "_sample", lambda *args, **kwargs: text)
    settings = SimpleNamespace(sample_steps=1, sample_tokens=4, sample_prompt="")
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    sampler.on_evaluate(SimpleNamespace(settings=settings), state, None, model=torch.nn.Linear(1, 1))
    printed = capsys.readouterr()
    assert f"sample: {shown}\n" in printed.out + printed.err
    assert json.loads(run.samples.read_text(encoding="utf-8"))["text"] == text


def test_no_name_of_a_validation_set_hides_another_loss(tiny_recipe, documents, train, events, tmp_path) -> None:
    recipe = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    names = ("average", "b", "average_b", "ema_b", "validation", "loss", "tokens", "hellaswag")
    for name, text in zip(names, documents[::3], strict=False):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    sets = [f"{name}={tmp_path}/{name}.txt" for name in names]
    recipe["data"] |= {"dataset_dir": str(tmp_path / "data"), "validation_sets": sets}
    prepare(DataArguments(**recipe["data"]))
    options = ("--dataset_dir", tmp_path / "data", "--ema_steps", 3, "--max_steps", 4, "--eval_tokens", 1500)
    run = train(tmp_path / "run", *options)
    (last,) = [event for event in events(run) if event["step"] == 4 and "eval_loss" in event]
    losses, card = Run(run), (run / "final" / "README.md").read_text(encoding="utf-8")
    assert len(losses.further_sets) == 2 * len(names) + 1
    for weights, prefix in ((run / "checkpoint-4", "eval"), (run / "final", "eval_EMA")):
        model = AutoModelForCausalLM.from_pretrained(weights).eval()
        for name in ("", *(f"_{name}" for name in names)):
            rows = rows_of(tmp_path / "data", f"validation{name}")
            taken = [row for place, row in enumerate(rows) if targets_of(rows[:place]) < 1500]
            assert last[f"eval{name}_tokens"] == targets_of(taken) and (len(taken) < len(rows)) == (not name)
            expected = mean_nll(model, taken)
            assert last[f"{prefix}{name}_loss"] == pytest.approx(expected, abs=1e-5), name
            assert (f"{last[f'{prefix}{name}_loss']:.4f} nats" in card) == (prefix == "eval_EMA"), name
    # The report shows the main validation split although a set has the name "validation".
    figure = Figure()
    draw_loss(figure, [DrawnSetting([losses], "run", "C0")])
    assert last["eval_loss"] in [line.get_ydata()[-1] for line in figure.axes[0].lines if len(line.get_ydata())]


def test_sample_from_infinite_logits_does_not_end_the_run(typed, events, tmp_path) -> None:
    """A sample from logits that are not finite does not end the run."""
    # In an earlier version, the sampler raised an exception before UpdateGuard ended the run. The run then ended with
    # a traceback instead of the state `diverged`, at the same step after every restart.
    run, words = tmp_path / "run", ("--config_overrides", "initializer_range=1e38")
    done = typed(run, *words, "--eval_steps", 1, "--max_steps", 12, "--sample_steps", 1)
    assert (done.returncode, status(run)["state"]) == (1, "diverged")
    assert done.stdout.count("TextSampler") == FAILURES_ALLOWED and "Traceback" not in done.stderr
    assert "eval_loss is not finite at step 0" in done.stdout + done.stderr  # the loss is logged too
    assert [event["eval_loss"] for event in events(run) if "eval_loss" in event][1] is None
    assert not (run / "samples.jsonl").exists()


def test_bad_hellaswag_file_is_refused(typed, tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"ctx": "abc", "label": 0}\n', encoding="utf-8")
    done = typed(tmp_path / "run", "--hellaswag_steps", 4, "--hellaswag_data", tmp_path / "bad.jsonl")
    assert done.returncode == 2 and "endings" in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("fixed_length", [None, 8])
@pytest.mark.parametrize("rows", [1, 5, 8, 9])
def test_processes_make_equal_passes_and_count_each_row_once(rows: int, fixed_length: int | None) -> None:
    """All processes make equally many forward passes, and each row is counted once."""
    table = Dataset.from_dict({"input_ids": [list(range(n, n + 5)) for n in range(rows)]}).with_format("numpy")
    args = [SimpleNamespace(process_index=n, world_size=3, per_device_eval_batch_size=2) for n in range(3)]
    shares = [list(validation_batches(table, of_process, fixed_length)) for of_process in args]
    # With sharded weights, a process with one more pass would wait forever for the other processes.
    assert {len(share) for share in shares} == {-(-rows // 6)}
    counted = [batch["labels"][batch["labels"] != -100] for share in shares for batch in share]
    assert sorted(torch.cat(counted).tolist()) == sorted(n + label for n in range(rows) for label in range(1, 5))
