"""The model card: what a model is, what it was trained on and how, how good it is, and what it is not good for."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.comparison import Comparison, ComparisonRow
from gpt2_repro.files import write_whole
from gpt2_repro.run_record.checkpoints import training_record
from gpt2_repro.run_record.layout import ENVIRONMENT, RECIPE


# The Hub's name and split of each task's data, for its form of evaluation results.
DATASETS = {
    "lambada_openai": ("LAMBADA (OpenAI)", "EleutherAI/lambada_openai", "test"),
    "hellaswag": ("HellaSwag", "Rowan/hellaswag", "validation"),
    "hellaswag_completion": ("HellaSwag, llm.c's completion style", "Rowan/hellaswag", "validation"),
    "wikitext": ("WikiText-2", "EleutherAI/wikitext_document_level", "test"),
}
SETTINGS = (
    *("tokens_per_step", "max_steps", "learning_rate", "warmup_steps", "final_learning_rate_fraction", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "dropout"),
)


def model_card(
    name: str, record: Mapping[str, Any], comparison: Comparison | None = None, column: str | None = None
) -> str:
    """Return the model card as Markdown with the Hub's header.

    Args:
        record: what `training_record` returns.
        comparison: whose `column` is this model. Results of a smoke test are left out.
    """
    environment = record["environment"]
    run_identity, data = environment["run_identity"], environment["data"]
    start = run_identity.get("init_from")
    origin = f"trained on from the weights of `{start}`" if start else "trained from scratch"
    rows = _rows(comparison, column)
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if rows and column:
        header["model-index"] = [{"name": name, "results": _results(rows, column)}]
    facts = {
        "tokens": f"{record['tokens']:,}",
        "window": f"{environment['plan']['sequence_length']} tokens",
        **{
            f"validation loss{f', {key[5:-5]}' if key != 'eval_loss' else ''}": f"{value:.4f} nats per token"
            for key, value in record["losses"].items()
        },
        "precision": environment["precision"],
        "seed": environment["seed"],
        "versions": ", ".join(f"{package} {version}" for package, version in environment["versions"].items()),
        "commit": environment["commit"],
    }
    settings = {key: run_identity[key] for key in SETTINGS if key in run_identity}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {name}",
        f"{_architecture(environment)}, {origin}. One seed is one checkpoint, not a recipe.",
        _table(facts),
        *_evaluation(rows, comparison, column),
        "## Data\n\n" + _table(_describe_data(data)),
        "## Recipe\n\n" + _table(settings) + f"\n\n`{RECIPE}` and `{ENVIRONMENT}` of the run have the rest.",
        *_deviations(environment.get("deviations")),
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```',
        f"## Limits\n\nA base model: it continues text, follows no instructions, and repeats what its data holds, errors and "
        f"prejudice included. Nothing was filtered for safety. It sees {environment['plan']['sequence_length']:,} tokens at once.",
    ]
    return _without_folders("\n\n".join(parts) + "\n")


def _architecture(environment: Mapping[str, Any]) -> str:
    kind, parameters = environment.get("architecture", "gpt2"), environment["parameters"]
    active = environment.get("active_parameters", parameters)
    part = f", {active:,} of them active for a token" if active < parameters else ""
    return f"A {'GPT-2' if kind == 'gpt2' else kind} of {parameters:,} parameters{part}"


def add_results(final: Path, record: Mapping[str, Any], comparison: Comparison, column: str | None = None) -> None:
    """Write the results of `column` into the card of a final/. Results of a smoke test are not.

    Args:
        record: of the weights that were scored. If the run has replaced them since, the card stays as it is.
    """
    if comparison.limit is None and record and training_record(final).get("sha256") == record["sha256"]:
        write_whole(final / "README.md", model_card(final.resolve().parent.name, record, comparison, column))


def _rows(comparison: Comparison | None, column: str | None) -> list[ComparisonRow]:
    if comparison is None or column is None or comparison.limit is not None:
        return []
    return [row for row in comparison.rows if (score := row.values.get(column)) and score.value is not None]


def _results(rows: list[ComparisonRow], column: str) -> list[dict[str, Any]]:
    """Evaluation results in the Hub's form."""
    results = []
    for task in dict.fromkeys(row.task for row in rows):
        title, dataset, split = DATASETS.get(task, (task, task, "test"))
        metrics = [
            {"type": row.metric, "name": row.metric, "value": round(value, 4)}
            for row in rows
            if row.task == task and (value := row.values[column].value) is not None
        ]
        of = {"name": title, "type": dataset, "split": split}
        results.append({"task": {"type": "text-generation"}, "dataset": of, "metrics": metrics})
    return results


def _evaluation(rows: list[ComparisonRow], comparison: Comparison | None, column: str | None) -> list[str]:
    if not rows or comparison is None:
        return []
    names = {str(column): "this model"}
    if comparison.baseline not in (None, column):
        names[str(comparison.baseline)] = str(comparison.baseline)
    table = dataclasses.replace(comparison, rows=rows).table(names).markdown()
    note = (
        f"lm-evaluation-harness {comparison.versions['lm_eval']}, window {comparison.max_length:,} tokens, "
        f"{comparison.dtype}; `{comparison.command}`, {comparison.date[:10]}."
    )
    return [f"## Evaluation\n\n{table}\n\n{note}"]


def _describe_data(data: Mapping[str, Any]) -> dict[str, Any]:
    train = data["counts"]["train"]
    return {
        "source": json.dumps(_without_files(data["source"])),
        "documents": f"{train['documents']:,}",
        "tokens": f"{train['tokens']:,}",
        "packing": data["request"]["packing"],
        "separator": data["request"]["separator"],
    }


def _without_files(value: Any) -> Any:
    """Drop the lists of local files from the description of a source, of mixtures too: they are many."""
    if isinstance(value, Mapping):
        return {key: _without_files(its) for key, its in value.items() if key != "files"}
    return [_without_files(item) for item in value] if isinstance(value, list) else value


def _without_folders(text: str) -> str:
    """Shorten absolute paths to their last part: the folders are of one machine."""
    return re.sub(r"(?<![\w./-])/(?:[^\s/\"',=]+/)+", "", text)


def _deviations(found: list[Mapping[str, str]] | None) -> list[str]:
    """How the run deviates from `recipes/gpt2_124m.yaml`, llm.c's GPT-2 124M on FineWeb. A run of before did not say."""
    if found is None:
        return []
    there = "`recipes/gpt2_124m.yaml`, llm.c's GPT-2 124M on FineWeb"
    if not found:
        return [f"In what is learned it does not deviate from {there}."]
    lines = [
        "| " + " | ".join(its[key].replace("|", "/") for key in ("field", "run", "recipe")) + " |"
        for its in found
        if its["field"] != "data.data_files"  # paths of one machine
    ]
    table = "\n".join(["| field | here | there |", "| --- | --- | --- |", *lines])
    return [f"## Deviations from {there}\n\n{table}"]


def _table(facts: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items())])
