"""Every recipe is valid in all scripts, for its GPUs, and with options that override it."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainingArguments

import train
from gpt2_repro.cli import words_of
from gpt2_repro.config import load_sections, parse_recipe
from gpt2_repro.config import values_of as section_values
from gpt2_repro.data.sources.presets import PRESETS, peak_bytes
from gpt2_repro.fields import settings_of
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.planning.workload import workload_of
from gpt2_repro.recipe import REFUSED_FIELDS, EvaluationRecipe
from gpt2_repro.tokens import TokenCount
from gpt2_repro.training.deviations import compare_with_default
from gpt2_repro.training.settings import run_identity_of
from tests.sections import RECIPES, ROOT, SECTIONS, parse_for_preparation, parse_for_training, values_of


DEFAULT = ROOT / "recipes" / "gpt2_124m.yaml"
# The recipes for rented machines. The other recipes have only a short header.
RUNGS = [path for path in RECIPES if path.parent.name == "ladder"]
SHORT = ("demo", "own_text", "shakespeare", "finetune")
GPT2 = [path for path in RECIPES if path not in RUNGS and not path.stem.startswith(SHORT)]
# llm.c's scripts/run_gpt2_*.sh: steps (-x), tokens per step (-d), learning rate (-l), final fraction (-q), text (-i).
LLMC = {
    "gpt2_124m": (18_865, 524_288, 6e-4, 0.0, "fineweb-10bt"),
    "gpt2_350m": (60_000, 524_288, 3e-4, 0.0, "HuggingFaceFW/fineweb:sample-100BT"),
    "gpt2_774m": (286_102, 524_288, 2.5e-4, 0.0, "HuggingFaceFW/fineweb:sample-100BT"),
    "gpt2_1558m": (32_000, 1_048_576, 6e-4, 0.1, "fineweb-edu-100bt"),
}


def header_of(path: Path) -> str:
    """Return the comment at the top of a recipe as one line."""
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


def changed(values: dict[str, dict], default: dict[str, dict]) -> set[str]:
    return {key for name, keys in values.items() for key, value in keys.items() if value != default[name][key]}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_for_every_script_and_resolves_to_the_same_run(path: Path, tmp_path: Path) -> None:
    trained = parse_for_training(path, "--trainer", "dataloader_prefetch_factor=3")
    assert parse_for_preparation(path).data == trained.data
    assert trained.evaluation == parse_recipe(EvaluationRecipe, [str(path)]).evaluation
    (tmp_path / "recipe.yaml").write_text(trained.to_yaml(), encoding="utf-8")
    assert parse_for_training(tmp_path / "recipe.yaml").sections == trained.sections


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem != "own_text"], ids=lambda path: path.stem)
def test_a_recipe_divides_on_the_gpus_that_its_header_names(path: Path) -> None:
    recipe = parse_for_training(path)
    numbers = re.search(r"((?:\d+(?:, | or | and ))*\d+) (?:GPUs|processes)", header_of(path))
    counts = map(int, re.findall(r"\d+", numbers[1] if numbers else "1"))
    plans = [plan_run(recipe.training, recipe.data, num_processes=count) for count in counts]
    assert len({plan.max_steps for plan in plans}) == 1
    for plan in plans:
        passes = plan.num_processes * plan.gradient_accumulation_steps
        assert passes * plan.micro_batch_size * plan.sequence_length == recipe.training.tokens_per_step


@pytest.mark.parametrize("path", GPT2, ids=lambda path: path.stem)
def test_the_text_suffices_and_validates_on_enough(path: Path) -> None:
    values = values_of(path)
    data, training = values["data"], values["training"]
    preset = PRESETS.get(data["source"])
    tokens = min(data["max_tokens"] or 1e12, preset.tokens if preset else 1e12)
    held_out = data["validation_tokens"] if data["split"] == "head" else data["validation_fraction"] * tokens
    assert held_out >= training["eval_tokens"]
    trained = (training["stop_at_step"] * training["tokens_per_step"]) or training["total_tokens"]
    epochs = round(trained / (tokens - held_out), 2)  # FineWeb-Edu 10BT lacks the tokens of 70 of 18,865 steps
    repeated = {"gpt2_774m": 1.50, "gpt2_124m_openwebtext": 1.10, "gpt2_124m_best": 4.99}
    if data["packing"] == "concat":  # with windows, positions are counted, and text is padded or dropped
        assert epochs == repeated[path.stem] if path.stem in repeated else epochs <= 1.0


@pytest.mark.parametrize("size", LLMC)
def test_each_size_is_llmc_s_script(size: str) -> None:
    values = values_of(ROOT / "recipes" / f"{size}.yaml")
    model, flat = values["model"], {key: value for section in values.values() for key, value in section.items()}
    steps, tokens_per_step, learning_rate, final, source = LLMC[size]
    expected = {"warmup_steps": 700, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1}
    expected |= {"max_grad_norm": 1.0, "bf16": True, "dropout": 0.0, "source": source, "learning_rate": learning_rate}
    expected |= {"total_tokens": steps * tokens_per_step, "tokens_per_step": tokens_per_step}
    assert (expected | {"final_learning_rate_fraction": final}).items() <= flat.items()
    shape = {"n_layer": model["n_layer"], "n_embd": model["n_embd"], "n_positions": flat["sequence_length"]}
    parameters = gpt2_parameters(**shape, vocab_size=50_257)
    published = {124_439_808: "", 354_823_168: "-medium", 774_030_080: "-large", 1_557_611_200: "-xl"}
    assert values["evaluation"]["baseline"] == f"openai-community/gpt2{published[parameters]}"
    assert model["n_embd"] == 64 * model["n_head"]
    # All other fields have the values of the default recipe, except those for measuring, saving and memory.
    default = values_of(DEFAULT)
    free = {"n_layer", "n_head", "n_embd", "source", "dataset_dir", "max_tokens", "tokens_per_step", "total_tokens"}
    free |= {"learning_rate", "final_learning_rate_fraction", "per_device_train_batch_size", "baseline"}
    free |= {"eval_steps", "hellaswag_steps", "sample_steps", "save_steps", "save_minutes", "keep_every_steps"}
    free |= {"save_rolling_minutes"}
    assert changed(values, default) <= free


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_is_matched_to_gpt2_and_changes_nothing_else(path: Path) -> None:
    values, default = values_of(path), values_of(DEFAULT)
    models = (parse_for_training(each).model for each in (DEFAULT, path))
    gpt2, other = (scale_of(model, sequence_length=1024, vocab_size=50_257) for model in models)
    assert other.active == pytest.approx(gpt2.active, rel=0.01)
    assert other.flops_per_token == pytest.approx(gpt2.flops_per_token, rel=0.002)
    assert changed(values, default) <= {"config_overrides", "model_type", "output_dir"}
    page = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
    row = f"| `{path.stem}` | {other.active / 1e6:.1f}M | {other.flops_per_token / 1e6:.1f} |"
    assert row in re.sub(" +", " ", page)


WITH_DISK = [path for path in GPT2 if re.search(r"Disk \d", header_of(path))]


@pytest.mark.parametrize("path", WITH_DISK, ids=lambda path: path.stem)
def test_the_bytes_of_a_header_are_those_of_preflight(path: Path, tmp_path: Path) -> None:
    header = header_of(path)
    work = workload_of(parse_for_training(path, "--dataset_dir", tmp_path / "none"))
    disk = re.search(r"Disk (\d+) GB of data \((\d+) GB during preparation\) and ([\d.]+) GB for the run", header)
    run, size = work.run_bytes, work.data_bytes
    preset = PRESETS.get(values_of(path)["data"]["source"], PRESETS["fineweb-10bt"])
    peak = peak_bytes(staged=size, rows=size, downloads=preset.downloads)
    assert disk and [float(text) * 1e9 for text in disk.groups()] == pytest.approx([size, peak, run], abs=1e9)


def test_the_dataclasses_default_to_the_default_recipe() -> None:
    """The dataclass default of every field is the value in the default recipe."""
    for section in parse_for_training().sections.values():
        # The dataclass default of hellaswag_steps is 0, because HellaSwag must be downloaded.
        for name in section_values(section).keys() - {"hellaswag_steps"}:
            assert getattr(section, name) == getattr(type(section)(), name), name


def test_no_field_has_two_owners_and_each_has_a_help_text() -> None:
    names = [field.name for cls in SECTIONS for field in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    for cls in SECTIONS:
        assert all(len(field.metadata["help"]) > 10 for field in dataclasses.fields(cls))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    training = "training:\n  total_tokens: 10e9\n  bf16: false\n  report_to: [wandb, tensorboard]\n"
    path.write_text(f"model:\n  n_layer: 3\n{training}", encoding="utf-8")
    return path


def test_the_file_sets_values_and_the_command_line_wins(recipe: Path) -> None:
    def parse(*words: object) -> list:
        parsed = parse_for_training(recipe, *words)
        training = parsed.training
        return [parsed.model.n_layer, training.total_tokens, training.bf16, training.report_to, training.seed]

    assert parse() == [3, 10_000_000_000, False, ["wandb", "tensorboard"], 42]
    words = ("--n-layer", "4", "--total_tokens=1_000_000_000", "--bf16", "--report_to", "none")
    assert parse(*words)[:3] == [4, 1_000_000_000, True] and parse(*words)[3] in ("none", ["none"])


def test_the_overrides_as_words_are_the_same_overrides(recipe: Path) -> None:
    words = "--learning_rate 1e-4 --no_bf16 --torch_compile=false --sample_prompt=-x --report_to a b --trainer k=[1]"
    overrides = parse_for_training(recipe, *words.split()).overrides()
    assert len(overrides) == 6 and parse_for_training(recipe, *words_of(overrides)).overrides() == overrides


def test_a_recipe_of_the_repository_is_found_from_another_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_sections(Path("recipes/gpt2_124m.yaml")) == load_sections(DEFAULT)


@pytest.mark.parametrize("text", ["1.5", "-3", "many", "nan"])
def test_token_counts_are_exact_whole_numbers(text: str) -> None:
    assert {TokenCount(number) for number in ("10e9", "10_000_000_000", 10**10, 1e10)} == {10**10}
    with pytest.raises(ValueError):
        TokenCount(text)


@pytest.mark.parametrize(("command", "most"), [("train.py", 30), ("prepare_data.py", 12)])
def test_help_is_short_and_needs_no_torch(command: str, most: int, type_command) -> None:
    done = type_command("python", "-X", "importtime", command, "--help")
    assert done.returncode == 0
    assert most - 5 <= len(re.findall(r"^  --[a-z]", done.stdout, re.MULTILINE)) <= most
    assert "--help all" in done.stdout and "JsonObject" not in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_help_all_has_every_field_below_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    texts: dict[str, str] = {}
    for words in ("--help", "--help all"):
        with pytest.raises(SystemExit):
            train.main(words.split())
        texts[words] = capsys.readouterr().out
    for section in SECTIONS:
        heading = section._argument_group_name
        names = set(re.findall(r"^  --([a-z]\w*)", texts["--help all"].partition(heading)[2], re.MULTILINE))
        fields = settings_of(section)
        assert fields.keys() <= names, heading
        for name, setting in fields.items():
            assert (f"  --{name} " in texts["--help"]) == setting.is_common, name


def test_places_and_limits_are_not_in_the_title_of_a_run(recipe: Path) -> None:
    words = ("--seed", 7, "--sync_to", "hf://buckets/me/b", "--max_usd", 5, "--usd_per_hour", 2, "--output_dir", "x")
    assert parse_for_training(recipe, *words).title == "run seed=7"


def test_diff_recipe_prints_both_values_and_needs_no_data(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    train.main([str(ROOT / "recipes" / "demo.yaml"), "--dropout", "0.1", "--diff_recipe", str(DEFAULT)])
    assert re.search(r"^.*dropout.* 0\.1 .* 0\.0.*$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "reference"),
    [
        ("check_124m", "llm.c"),
        ("gpt2_124m --seed 7 --per_device_train_batch_size 16 --stop_at_step 1000", "llm.c"),
        ("gpt2_124m --source fineweb-10bt-tokens --split source", "llm.c"),
        ("gpt2_124m --precision bf16", "llm.c"),
        ("gpt2_350m", "llm.c 350M"),
        ("gpt2_350m --learning_rate 6e-4", None),
        ("gpt2_350m --source fineweb-10bt-tokens", None),
        ("gpt2_124m --precision fp16", None),
        ("gpt2_124m --source fineweb-edu-10bt", None),
        ("gpt2_124m --eval_tokens 1048576", None),
        ("gpt2_124m --learning_rate 5e-4", None),
        ("blog_wrap512", None),
    ],
)
def test_only_a_run_on_a_published_curve_has_a_reference(words: str, reference: str | None) -> None:
    name, *options = words.split()
    run = parse_for_training(ROOT / "recipes" / f"{name}.yaml", *options)
    assert compare_with_default(run)[0] == reference


def test_what_is_known_of_each_field() -> None:
    """A run that has started resumes only if its identity still has the same names."""
    recipe = parse_for_training()
    data = SimpleNamespace(sha256={"train": ""}, tokenizer_sha256="")
    plan = plan_run(recipe.training, recipe.data, num_processes=1)
    identity = run_identity_of(recipe.training, plan, data=cast("Any", data), model=recipe.model)
    changeable = "learning_rate warmup_steps final_learning_rate_fraction lr_scheduler_type decay_fraction seed "
    changeable += "data_seed train_sampling_strategy max_grad_norm data validation max_steps "
    changeable += "bf16 precision dropout"
    fixed = "optim weight_decay adam_beta1 adam_beta2 adam_epsilon muon_momentum ema_steps model_type n_layer n_head "
    fixed += "config_overrides n_embd pad_vocab_to_multiple_of document_mask init_from tokenizer sequence_length "
    fixed += "tokens_per_step"
    assert identity.changeable == {*changeable.split()}
    assert identity.values.keys() == {*changeable.split(), *fixed.split()}
    refused = {name for names in REFUSED_FIELDS.values() for name in names.split()}
    assert refused <= {field.name for field in dataclasses.fields(TrainingArguments)}
