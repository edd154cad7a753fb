"""`python -m gpt2_repro.preflight` has the right output, errors and exit codes."""

import re
import shlex
from pathlib import Path

import pytest

from gpt2_repro import train as train_command
from gpt2_repro.data.arguments import name_folder
from gpt2_repro.errors import UserError
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.planning.cost import PRICES, cost_of
from gpt2_repro.planning.workload import workload_of
from gpt2_repro.preflight import __main__ as preflight
from gpt2_repro.preflight import commands
from gpt2_repro.recipe import load_recipe, output_dir_of
from tests.sections import ROOT, parse_for_preparation, parse_for_training


CHECKPOINTED = {"per_device_train_batch_size": 4, "activation_checkpointing": True}


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]):
    """Return a function that runs preflight and returns the exit code and output."""

    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            preflight.main([str(word) for word in words])
        return int(end.value.code or 0), capsys.readouterr().out

    return run


def test_a_machine_that_is_not_there_yet(look) -> None:
    code, out = look("--gpu", "A100 SXM", "--n", 8, "--usd_per_hour", 14)
    # With --gpu no machine is checked: the findings are only about the recipe and the name of the card.
    assert code == 0
    assert {line.split()[1] for line in out.splitlines() if line[:1] in ("✓", "!", "✗")} == {"step", "memory", "card"}
    for number in ("18,865", "9,890,693,120", "113.2 min", "$14.00", "20.7 GB", "10.5 GB"):
        assert number in out, number


ROWS_32, ROWS_16 = {"per_device_train_batch_size": 32}, {"per_device_train_batch_size": 16, "precision": "fp16"}
PRINTED: list[tuple[str, str, dict[str, object]]] = [
    ("--gpu RTX4090 --per_device_train_batch_size 32 --total_tokens 2e9", "accelerate 1", {}),
    ("--gpu RTX4090", "accelerate 1", ROWS_32),  # 64 rows do not fit
    ("--gpu T4", "python", ROWS_16),
    ("--gpu T4 --n 2 --precision auto", "accelerate 2", {**ROWS_16, **ROWS_32}),
    ("--gpu 4080 --sequence_length 32768", "accelerate 1", CHECKPOINTED),
    ("recipes/demo.yaml --gpu H100 --n 2 --no_bf16 --seed=7 --n_layer 2 --output_dir 'my run'", "accelerate 2", {}),
    ("--gpu A100 --n 4 --source fineweb-edu-10bt --sequence_length 512 --usd_per_hour 3", "accelerate 4", {}),
    ('--gpu H100 --sample_prompt "it\'s" --trainer a=3 --report_to wandb mlflow --tasks a b', "accelerate 1", {}),
    ("--use_cpu --tokens_per_second 9 --data_files 'b c.txt' d.txt --dataset_dir 'data/b c'", "python", {}),
]


@pytest.mark.parametrize(("words", "start", "changed"), PRINTED)
def test_the_printed_commands_do_what_is_planned(
    look, capsys, monkeypatch: pytest.MonkeyPatch, words: str, start: str, changed: dict
) -> None:
    monkeypatch.setattr(commands, "MANIFEST", "none")  # as if no data was prepared, for example by `make demo`
    _, out = look(*shlex.split(words))
    prepare, train, evaluate = (shlex.split(line) for line in out.partition("Commands:\n")[2].splitlines())
    options = train[train.index("train.py") + 1 :]
    assert train[0] == start.split()[0] and (train[0] == "python" or train[5] == start.split()[1])
    recipe = load_recipe(shlex.split(words), options=preflight.OPTIONS).with_training(**changed)
    assert parse_for_training(*options).sections == recipe.sections
    prepared = parse_for_preparation(*prepare[prepare.index("prepare_data.py") + 1 :])
    assert name_folder(prepared.data, prepared.typed) == recipe.data
    assert evaluate[-1] == output_dir_of(recipe)
    train_command.main([*options, "--dry_run"])
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"  on \d|tokens per|steps|disk", line)]
    assert len(lines) >= 5 and not set(lines) - set(out.splitlines())


def test_two_machines(look) -> None:
    code, out = look("--gpu", "H100 SXM", "--n", 16)
    assert code == 0
    assert "! machines" in out
    assert "Pass --per_device_train_batch_size 32" in out
    total = re.search(r"^total .* \$([\d.]+) at \$63.84 an hour", out, re.MULTILINE)
    of_one_machine = re.search(r"^total .* \$([\d.]+) at", look("--gpu", "H100 SXM", "--n", 8)[1], re.MULTILINE)
    assert total and of_one_machine
    assert float(total[1]) > float(of_one_machine[1])  # because of the network between them
    loss = re.search(r"; x ([\d.]+) for the network between 2 machines .* \(assumed\)", out)
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert loss and f"speed is {loss[1]} times" in page
    *_, first, second, evaluate = (shlex.split(line) for line in out.partition("Commands")[2].splitlines())
    for rank, words in enumerate((first, second)):
        assert words[:4] == ["accelerate", "launch", "--config_file", "accelerate_configs/zero1_multinode.yaml"]
        launch = words[4 : words.index("train.py")]
        expected = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", str(rank)]
        assert launch == [*expected, "--main_process_ip", "MACHINE_0"]
        recipe = parse_for_training(*words[words.index("train.py") + 1 :])
        assert plan_run(recipe.training, recipe.data, num_processes=16).gradient_accumulation_steps == 1
    assert evaluate[-1] == "runs/gpt2_124m"


@pytest.mark.parametrize(
    "words",
    ["--gpu H100 --n 12", "--gpu list --n 12", "--n 9", "--gpu list --budget 20", "--gpu H100 --n 16 --budget 20"],
)
def test_machines_and_lists_that_do_not_exist(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--n|--budget"):
        preflight.main(words.split())
    assert not list(tmp_path.iterdir())


def test_the_list_has_the_price_of_each_card(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.main(["--gpu", "list"])
    out = capsys.readouterr().out
    offers = re.findall(r"^ *\$([\d.]+) +([\d.]+) h  (.+?) +\$([\d.]+) an hour", out, re.MULTILINE)
    assert len(offers) == len(PRICES)
    totals = [float(usd) for usd, *_ in offers]
    assert totals == sorted(totals)
    work = workload_of(parse_for_training("--dataset_dir", "data/nowhere"))
    planned = cost_of(work, "RTX 4090", 1)
    assert (f"{planned.usd:.2f}", f"{planned.minutes / 60:.1f}", "RTX 4090", f"{planned.usd_per_hour:.2f}") in offers
    preflight.main(["recipes/ladder/7_moe.yaml", "--gpu", "list"])  # its speed does not follow from its FLOPs
    assert "$" not in capsys.readouterr().out


def test_a_run_that_does_not_fit_has_no_commands(look) -> None:
    too_long = "--gpu T4 --sequence_length 262144 --tokens_per_step 262144 --per_device_train_batch_size 1"
    code, out = look(*too_long.split())
    assert code == 1 and "✗" in out and "Commands:" not in out


def test_a_step_that_does_not_divide_is_refused() -> None:
    for gpu in ("4090", "list"):  # 64 rows do not fit, but no other number divides either
        with pytest.raises(UserError, match="--tokens_per_step 393216"):
            preflight.main(["--gpu", gpu, "--n", "3"])


def test_a_recipe_for_a_budget(look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    machine = ("--gpu", "H100 SXM", "--n", 8)
    # Also three GPUs, and a typed speed of GPT-2 124M, which the larger model does not reach.
    for budget, options in ((100, (*machine[:2], "--n", 3, "--tokens_per_second", 1_000_000)), (25, machine)):
        code, out = look("--budget", budget, *options)
        total = re.search(r"^total .* \$([\d.]+) at", out, re.MULTILINE)
        assert code == 0 and total and float(total[1]) == pytest.approx(budget, rel=0.01)
        assert re.search(r"^# expected loss .* No full run has been made yet", out, re.MULTILINE)
    path = tmp_path / "budget_25usd.yaml"
    assert parse_for_training(path).model.n_layer == 13  # near gpt2_124m, which costs $29
    assert "prepare_data.py budget_25usd.yaml" in out and "train.py budget_25usd.yaml" in out
    path.write_text(path.read_text(encoding="utf-8").replace("n_head: 13", "n_head: 6"), encoding="utf-8")
    other_recipe = "recipes/demo.yaml --budget 25"
    for words in (other_recipe, "--budget 25", "--budget 25 --optim muon", "--budget 30_000", "--budget 3"):
        with pytest.raises(UserError, match=r"demo.yaml|budget_25usd|--optim|350B|--budget"):
            preflight.main([*words.split(), *map(str, machine)])
    assert "n_head: 6" in path.read_text(encoding="utf-8")
    # With both limits, the smaller one counts. The fields that were passed stay in the commands.
    for hours, name in ((9, "budget_20usd"), (1, "budget_1h")):
        code, out = look("--budget", 20, "--hours", hours, *machine[:2], "--usd_per_hour", 4, "--accept_any_hardware")
        assert f"train.py {name}.yaml --accept_any_hardware --usd_per_hour 4.0" in out
        assert parse_for_training(f"{name}.yaml").training.max_hours == min(hours, 5)
    assert not Path("recipes").exists()


# Words of the command line, texts in the output, and the exit code.
CARDS = [
    ("T4", ["! precision", "64 rows x 1024 tokens need 28", "python train.py recipes/gpt2_124m.yaml "], 1),
    ("T4 --tokens_per_second 9", ["! precision", "16.0 GB. Pass --per_device_train_batch_size 16\n"], 1),
    ("3090", ["1 x RTX 3090", "24.0 GB. Pass --per_device_train_batch_size 32\n", "estimated from the RTX 4090"], 1),
    ("A30", ["! memory", "estimated at 32% of the peak", "Pass --usd_per_hour"], 0),
    ("4080 --per_device_train_batch_size 16", ["✓ memory", "Pass --usd_per_hour"], 0),
]


@pytest.mark.parametrize(("words", "texts", "code"), CARDS)
def test_cards_that_people_own(look, words: str, texts: list[str], code: int) -> None:
    ended, out = look("--gpu", *words.split())
    assert ended == code and not [text for text in texts if text not in out], out
    assert ("--precision fp16" in out) == words.startswith("T4")


def test_this_machine(look, tiny_recipe: Path, tmp_path: Path) -> None:
    code, out = look(tiny_recipe, "--output_dir", tmp_path / "runs", "--use_cpu")
    lines = {line.split()[1]: line for line in out.splitlines() if line[:1] in ("✓", "!", "✗")}
    assert lines["torch"].startswith("✓") and lines["device"].startswith("✓") and "memory" not in lines
    assert lines["data"].startswith("✓") and "0 MB for data" in lines["disk"]
    assert "the speed of this run is not known. Pass --tokens_per_second" in out and "epochs" in out
    assert "--gpu list" in out and "$" not in out  # no offers
    commands = out.partition("Commands:")[2]
    assert "train.py" in commands and "prepare_data.py" not in commands  # it is prepared
    assert code == ("✗" in out) and not (tmp_path / "runs").exists()
    code, out = look(tiny_recipe, "--sequence_length", 16, "--use_cpu")
    assert code == 1 and "✗ data" in out and "sequence_length 32" in out
