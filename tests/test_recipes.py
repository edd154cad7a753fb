"""Every recipe parses for every script, divides on the GPU counts it is for, and no field has two owners."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, TrainingArguments

import train as train_story
from gpt2_repro.baselines import BASELINES
from gpt2_repro.compute import checkpoint_bytes, gpt2_parameters, plan_batches
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.presets import PRESETS, peak_bytes
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments, Overrides
from gpt2_repro.model.scale import scale_of
from gpt2_repro.plan import plan_run
from gpt2_repro.preflight.__main__ import main as preflight
from gpt2_repro.recipe import load_sections, own_fields, parse_recipe, read_section
from gpt2_repro.training.arguments import PretrainingArguments


ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SECTIONS = {
    "data": DataArguments,
    "model": ModelArguments,
    "training": PretrainingArguments,
    "evaluation": EvaluationArguments,
}
OPTIONS = ("data", "model", "training")
# The recipes of a rented machine, by their names; the others say what they are in a line or two.
GPT2 = [path for path in RECIPES if not path.stem.startswith(("demo", "shakespeare", "finetune"))]
OTHER_ARCHITECTURES = [path for path in GPT2 if path.stem in ("llama_124m", "moe_124m")]
ESTIMATED = [
    path
    for path in GPT2
    if path not in OTHER_ARCHITECTURES and path.stem not in ("gpt2_124m", "check_124m", "blog_wrap512")
]
# llm.c's scripts/run_gpt2_*.sh: steps (-x), tokens a step (-d), learning rate (-l), its final fraction (-q), and the text (-i).
LLMC = {
    "gpt2_124m": (18_865, 524_288, 6e-4, 0.0, "fineweb-10bt"),
    "gpt2_350m": (60_000, 524_288, 3e-4, 0.0, "HuggingFaceFW/fineweb:sample-100BT"),
    "gpt2_774m": (286_102, 524_288, 2.5e-4, 0.0, "HuggingFaceFW/fineweb:sample-100BT"),
    "gpt2_1558m": (32_000, 1_048_576, 6e-4, 0.1, "fineweb-edu-100bt"),
}


def values_of(path: Path) -> dict[str, dict[str, Any]]:
    return parse_recipe([str(path)], sections=SECTIONS, options=OPTIONS).values


def header_of(path: Path) -> str:
    """The comment that opens a recipe, in one line."""
    lines = path.read_text().split("\n\n")[0].splitlines()
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


def processes_of(path: Path) -> list[int]:
    """The numbers of GPUs or processes that the header says the recipe is for as it stands."""
    found = re.search(r"((?:\d+(?:, | or | and ))*\d+) (?:GPUs|processes)", header_of(path))
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else [1]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_for_every_script(path: Path) -> None:
    trained = parse_recipe([str(path)], sections=SECTIONS, options=OPTIONS)
    prepared = parse_recipe([str(path)], sections={"data": DataArguments})
    evaluated = read_section(path, "evaluation", EvaluationArguments)
    assert prepared.values["data"] == trained.values["data"]
    assert trained.values["evaluation"] == dataclasses.asdict(evaluated)
    for section, keys in load_sections(path).items():
        for key, value in keys.items():
            read = trained.values[section][key]
            assert (json.loads(read) if isinstance(value, dict) else read) == (
                float(value) if _is_number(value) else value
            ), f"{section}.{key}"


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return not isinstance(value, bool)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_is_a_recipe_of_the_same_run(path: Path, tmp_path: Path) -> None:
    first = parse_recipe([str(path), "--seed", "7", "--adam_beta1", "0.8"], sections=SECTIONS, options=OPTIONS)
    written = tmp_path / "recipe.yaml"
    written.write_text(first.to_yaml())
    assert parse_recipe([str(written)], sections=SECTIONS, options=OPTIONS).values == first.values


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_divides_on_the_gpus_that_its_header_names(path: Path) -> None:
    values, counts = values_of(path), processes_of(path)
    several = path in GPT2 or path.stem.startswith("finetune")
    assert counts == ([1, 2, 4, 8] if several else [1, 2] if path.stem == "demo" else [1])
    data, training = values["data"], values["training"]
    rows = {key: data[key] for key in ("sequence_length", "packing", "min_length")}
    plans = [plan_run(training, **rows, num_processes=count) for count in counts]
    assert len({plan.max_steps for plan in plans}) == 1
    assert {plan.passes_per_step * plan.positions_per_pass for plan in plans} == {training["tokens_per_step"]}


@pytest.mark.parametrize("path", GPT2, ids=lambda path: path.stem)
def test_a_header_says_what_is_needed_what_is_known_and_what_to_type(path: Path) -> None:
    header = header_of(path)
    for label in (r"Hardware \S", r"(Expected|Published) \S", r"Cost \S", "[Nn]ot yet run"):
        assert re.search(label, header), label
    assert re.search("published|Published", header) and re.search("[Ee]stimated|not estimated", header)
    recipe = f"recipes/{path.name}"
    assert f"python prepare_data.py {recipe}" in header
    launcher = "ddp" if values_of(path)["training"]["optim"] == "muon" else "zero1"
    assert f"accelerate launch --config_file accelerate_configs/{launcher}.yaml train.py {recipe}" in header
    assert path.stem == "check_124m" or f"bash evaluate.sh runs/{path.stem}" in header


@pytest.mark.parametrize("path", GPT2, ids=lambda path: path.stem)
def test_the_text_suffices_and_validates_on_enough(path: Path) -> None:
    values = values_of(path)
    data, training = values["data"], values["training"]
    preset = PRESETS.get(data["source"])
    tokens = min(data["max_tokens"] or 1e12, preset.size.tokens if preset else 1e12)
    held_out = data["validation_tokens"] if data["split"] == "head" else data["validation_fraction"] * tokens
    assert held_out >= training["eval_tokens"]
    trained = (training["stop_at_step"] * training["tokens_per_step"]) or training["total_tokens"]
    epochs = round(trained / (tokens - held_out), 2)  # FineWeb-Edu 10BT is 70 of 18,865 steps short
    repeated = {"gpt2_774m": 1.50, "gpt2_124m_openwebtext": 1.10}
    if data["packing"] == "concat":  # windows pad and drop: their recipe counts positions
        assert epochs == repeated[path.stem] if path.stem in repeated else epochs <= 1.0


def test_no_two_recipes_share_a_folder_of_different_data() -> None:
    folders: dict[str, dict[str, Any]] = {}
    for path in RECIPES:
        data = values_of(path)["data"]
        assert folders.setdefault(data["dataset_dir"], data) == data, path.stem


@pytest.mark.parametrize("size", LLMC)
def test_each_size_is_llmc_s_script(size: str) -> None:
    path = ROOT / "recipes" / f"{size}.yaml"
    values = values_of(path)
    model, training, data = (values[section] for section in ("model", "training", "data"))
    steps, tokens_per_step, learning_rate, final, source = LLMC[size]
    assert training["total_tokens"] == steps * tokens_per_step and training["tokens_per_step"] == tokens_per_step
    assert (training["learning_rate"], training["final_learning_rate_fraction"]) == (learning_rate, final)
    assert data["source"] == source
    shape = {key: model[key] for key in ("n_layer", "n_embd")}
    parameters = gpt2_parameters(**shape, n_positions=data["sequence_length"], vocab_size=50_257)
    published = {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    assert published[values["evaluation"]["baseline"].removeprefix("openai-community/")] == parameters
    assert parameters in [baseline.parameters for baseline in BASELINES]
    assert model["n_embd"] == 64 * model["n_head"]
    # All else is the default's, but for how often something is measured or saved and what fits in the memory.
    default = values_of(ROOT / "recipes" / "gpt2_124m.yaml")
    free = {"n_layer", "n_head", "n_embd", "source", "dataset_dir", "max_tokens", "tokens_per_step", "total_tokens"}
    free |= {"learning_rate", "final_learning_rate_fraction", "per_device_train_batch_size", "baseline"}
    free |= {"eval_steps", "hellaswag_steps", "sample_steps", "save_steps", "save_minutes", "keep_every_steps"}
    for section, keys in values.items():
        assert {key for key, value in keys.items() if value != default[section][key]} <= free


@pytest.mark.parametrize("path", OTHER_ARCHITECTURES, ids=lambda path: path.stem)
def test_another_architecture_is_matched_to_gpt2_and_changes_nothing_else(path: Path) -> None:
    values, default = values_of(path), values_of(ROOT / "recipes" / "gpt2_124m.yaml")
    scales = {}
    for model_type, section in (("gpt2", default["model"]), (values["model"]["model_type"], values["model"])):
        scales[model_type] = scale_of(ModelArguments(**section), sequence_length=1024, vocab_size=50_257)
    gpt2, other = scales["gpt2"], scales[values["model"]["model_type"]]
    assert other.active == pytest.approx(gpt2.active, rel=0.01)
    assert other.flops_per_token == pytest.approx(gpt2.flops_per_token, rel=0.001)
    header = header_of(path)
    for said in (other.active, other.parameters, gpt2.parameters):
        assert f"{said:,}" in header
    assert f"{other.flops_per_token / 1e6:.1f} MFLOP" in header
    assert f"{round(checkpoint_bytes(other.trained, bf16=True) / 1e9, 1):g} GB" in header
    changed = {key for name, keys in values.items() for key, value in keys.items() if value != default[name][key]}
    assert changed == {"model_type", "config_overrides"}


def test_grouped_query_attention_as_the_header_types_it() -> None:
    path = ROOT / "recipes" / "llama_124m.yaml"
    typed = re.search(r"--config_overrides '(\{.*?\})'", header_of(path))
    assert typed
    model = values_of(path)["model"] | {"config_overrides": Overrides(typed[1])}
    parameters = scale_of(ModelArguments(**model), sequence_length=1024, vocab_size=50_257).parameters
    assert f"{parameters:,} parameters" in header_of(path)


@pytest.mark.parametrize("path", GPT2, ids=lambda path: path.stem)
def test_a_dry_run_prints_the_plan(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    train_story.main([str(path), "--dry_run"])
    out = capsys.readouterr().out
    training = values_of(path)["training"]
    assert f"steps             {training['total_tokens'] // training['tokens_per_step']:,} = " in out
    assert all(
        f"on {count} GPUs       {training['per_device_train_batch_size']} rows" in out for count in (1, 2, 4, 8)
    )


@pytest.mark.parametrize("path", ESTIMATED, ids=lambda path: path.stem)
def test_the_hours_and_bytes_of_a_header_are_those_of_preflight(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header, data = header_of(path), values_of(path)["data"]
    monkeypatch.chdir(ROOT)
    for card in ("A100 SXM 80 GB", "H100 SXM"):
        with pytest.raises(SystemExit) as ended:
            preflight(
                [str(path), "--gpu", card, "--n", "8", "--json", "--dataset_dir", str(tmp_path / "not-prepared")]
            )
        planned = json.loads(capsys.readouterr().out)
        assert not ended.value.code
        said = re.search(rf"([\d.]+) hours on 8 x {card}", header)
        assert said and float(said[1]) == pytest.approx(planned["minutes"] / 60, rel=0.03)
    disk = re.search(r"Disk (\d+) GB of data \((\d+) GB while they are made\) and ([\d.]+) GB for the run", header)
    assert disk and float(disk[1]) == pytest.approx(planned["data_bytes"] / 1e9, abs=0.6)
    assert float(disk[3]) == pytest.approx(planned["run_bytes"] / 1e9, abs=0.6)
    preset = PRESETS.get(data["source"], PRESETS["fineweb-10bt"])
    size = planned["data_bytes"]
    peak = peak_bytes(staged=size, rows=size, downloads=preset.downloads)
    assert float(disk[2]) == pytest.approx(peak / 1e9, abs=1)


def test_the_page_of_recipes_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text().split("## The shipped recipes")[1].split("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == [path.stem for path in RECIPES]
    assert len({row.count(" | ") for row in rows}) == 1


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_default_recipe_is_llmc_on_1_to_8_gpus(processes: int) -> None:
    recipe = parse_recipe([], sections=SECTIONS, options=OPTIONS)
    training = recipe.values["training"]
    plan = plan_batches(
        tokens_per_step=training["tokens_per_step"],
        sequence_length=recipe.values["data"]["sequence_length"],
        micro_batch_size=training["per_device_train_batch_size"],
        num_processes=processes,
        total_tokens=training["total_tokens"],
    )
    assert (plan.max_steps, plan.gradient_accumulation_steps) == (18_865, 8 // processes)
    assert plan.total_tokens == 9_890_693_120
    wanted = {"learning_rate": 6e-4, "warmup_steps": 700, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
    wanted |= {"weight_decay": 0.1, "max_grad_norm": 1.0, "final_learning_rate_fraction": 0.0}
    assert {key: training[key] for key in wanted} == wanted
    assert recipe.values["model"] == {
        "model_type": "gpt2",
        "config_overrides": "",
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "dropout": 0.0,
        "pad_vocab_to_multiple_of": 128,
        "attn_implementation": "auto",
        "document_mask": False,
        "init_from": "",
    }
    assert recipe.values["data"]["source"] == "fineweb-10bt"


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_blog_recipe_is_the_published_one_on_1_to_8_gpus(processes: int) -> None:
    path = RECIPES[0].with_name("blog_wrap512.yaml")
    recipe = parse_recipe([str(path)], sections=SECTIONS, options=OPTIONS)
    data, training = recipe.values["data"], recipe.values["training"]
    plan = plan_batches(
        tokens_per_step=training["tokens_per_step"],
        sequence_length=data["sequence_length"],
        micro_batch_size=training["per_device_train_batch_size"],
        num_processes=processes,
        total_tokens=training["total_tokens"],
    )
    # One epoch of the post's own count, which has its padding in it, less its validation split.
    assert plan.max_steps == int(0.999 * 11_007_602_548) // 524_288 == 20_974
    assert (plan.rows_per_step, plan.gradient_accumulation_steps) == (1024, 16 // processes)
    wanted = {"source": "fineweb-edu-10bt", "packing": "wrap", "sequence_length": 512, "min_length": 256}
    wanted |= {"separator": "none", "split": "hash", "validation_fraction": 0.001}
    assert {key: data[key] for key in wanted} == wanted
    assert data["dataset_dir"] != DataArguments().dataset_dir
    wanted = {"learning_rate": 6e-4, "warmup_steps": 700, "final_learning_rate_fraction": 0.0, "weight_decay": 0.1}
    wanted |= {"max_grad_norm": 1.0, "bf16": True, "per_device_train_batch_size": 64}
    wanted |= {name: getattr(TrainingArguments, name) for name in ("adam_beta1", "adam_beta2", "adam_epsilon")}
    assert {key: training[key] for key in wanted} == wanted and training["adam_beta2"] == 0.999
    assert recipe.values["model"]["dropout"] == GPT2Config().resid_pdrop == 0.1
    assert recipe.values["evaluation"]["max_length"] == 512


def test_shakespeare_by_characters_is_nanogpt_s() -> None:
    """config/train_shakespeare_char.py, and the command of its readme for a CPU, but for the learning rate."""
    gpu, cpu = (
        values_of(RECIPES[0].with_name(f"{name}.yaml")) for name in ("shakespeare_char", "shakespeare_char_cpu")
    )
    shapes = [
        tuple(values["model"][key] for key in ("n_layer", "n_head", "n_embd", "dropout")) for values in (gpu, cpu)
    ]
    assert shapes == [(6, 6, 384, 0.2), (4, 4, 128, 0.0)]
    assert [values["data"]["sequence_length"] for values in (gpu, cpu)] == [256, 64]
    for values, rows, steps in ((gpu, 64, 5000), (cpu, 12, 2000)):
        training = values["training"]
        assert training["tokens_per_step"] == rows * values["data"]["sequence_length"]
        assert training["per_device_train_batch_size"] == rows
        assert training["total_tokens"] == steps * training["tokens_per_step"]
        assert (training["warmup_steps"], training["final_learning_rate_fraction"]) == (100, 0.1)
        assert (training["adam_beta2"], training["weight_decay"], training["max_grad_norm"]) == (0.99, 0.1, 1.0)
    assert gpu["training"]["learning_rate"] == 1e-3
    tuned = values_of(RECIPES[0].with_name("finetune_shakespeare.yaml"))["training"]
    assert (tuned["tokens_per_step"], tuned["learning_rate"], tuned["lr_scheduler_type"]) == (32_768, 3e-5, "constant")


def test_the_dataclasses_default_to_the_default_recipe() -> None:
    """But for HellaSwag, which most runs would have to fetch."""
    recipe = parse_recipe([], sections=SECTIONS, options=OPTIONS)
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            compared = field.name in own_fields(cls) and field.name != "hellaswag_steps"
            if compared and field.default is not dataclasses.MISSING:
                assert recipe.values[section][field.name] == field.default, f"{section}.{field.name}"


def test_no_field_has_two_owners_and_each_says_what_it_is() -> None:
    names = [field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    for cls in SECTIONS.values():
        for field in dataclasses.fields(cls):
            if field.name in own_fields(cls):
                assert len(field.metadata["help"]) > 10, field.name


def test_every_refused_field_exists_and_has_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(PretrainingArguments)}
    assert PretrainingArguments.refused.keys() <= fields
    assert all(PretrainingArguments.refused.values())
