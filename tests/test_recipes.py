"""Every recipe parses for every script, divides on the GPU counts it is for, and no field has two owners."""

import dataclasses
from pathlib import Path

import pytest
from transformers import GPT2Config, TrainingArguments

from gpt2_repro.compute import plan_batches
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.recipe import load_sections, own_fields, parse_recipe, read_section
from gpt2_repro.training.arguments import PretrainingArguments


RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
SECTIONS = {
    "data": DataArguments,
    "model": ModelArguments,
    "training": PretrainingArguments,
    "evaluation": EvaluationArguments,
}
OPTIONS = ("data", "model", "training")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_for_every_script(path: Path) -> None:
    trained = parse_recipe([str(path)], sections=SECTIONS, options=OPTIONS)
    prepared = parse_recipe([str(path)], sections={"data": DataArguments})
    evaluated = read_section(path, "evaluation", EvaluationArguments)
    assert prepared.values["data"] == trained.values["data"]
    assert trained.values["evaluation"] == dataclasses.asdict(evaluated)
    for section, keys in load_sections(path).items():
        for key, value in keys.items():
            assert trained.values[section][key] == (float(value) if _is_number(value) else value), f"{section}.{key}"


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
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "dropout": 0.0,
        "pad_vocab_to_multiple_of": 128,
        "attn_implementation": "auto",
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
