"""Write the model card: architecture, data, recipe, evaluation, use and limits."""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.evaluation.comparison import Comparison, ComparisonRow
from gpt2_repro.files import write_whole
from gpt2_repro.run_record.checkpoint import Checkpoint
from gpt2_repro.run_record.checkpoints import training_record
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import ENVIRONMENT, RECIPE
from gpt2_repro.text import Cell, Table


logger = logging.getLogger(__name__)

# Title, Hub id and split of each task's data, for the evaluation results in the header of the card.
DATASETS = {
    "lambada_openai": ("LAMBADA (OpenAI)", "EleutherAI/lambada_openai", "test"),
    "hellaswag": ("HellaSwag", "Rowan/hellaswag", "validation"),
    "hellaswag_completion": ("HellaSwag, llm.c's completion style", "Rowan/hellaswag", "validation"),
    "wikitext": ("WikiText-2", "EleutherAI/wikitext_document_level", "test"),
}
SETTINGS = (
    *("tokens_per_step", "max_steps", "learning_rate", "warmup_steps", "final_learning_rate_fraction", "weight_decay"),
    *("optim", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "muon_momentum", "dropout", "ema_steps"),
)


def model_card(
    name: str, record: TrainingRecord, comparison: Comparison | None = None, column: str | None = None
) -> str:
    """Return the model card as Markdown with the metadata header of the Hub.

    Args:
        name: the title of the card, and the name of the model in the card's code example.
        comparison: the evaluation results. Results of a smoke test are omitted.
        column: the name of this model in `comparison`.
    """
    environment, window = record.environment, record.environment.plan.sequence_length
    run_identity, data = environment.run_identity, environment.data
    kind, parameters, active = environment.architecture, environment.parameters, environment.active_parameters
    model = f"A {'GPT-2' if kind == 'gpt2' else kind} of {parameters:,} parameters"
    model += f", {active:,} of them used for each token" if active < parameters else ""
    start = run_identity.get("init_from")
    origin = f"trained from the weights of `{start}`" if start else "trained from scratch"
    rows = _rows(comparison, column)
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if rows and column:
        header["model-index"] = [{"name": name, "results": _results(rows, column)}]
    sets = {key: "" if key == "eval_loss" else f", {key[5:-5]}" for key in record.losses}
    facts = {
        "tokens": f"{record.tokens:,}",
        "window": f"{window} tokens",
        **{f"validation loss{name}": f"{record.losses[key]:.4f} nats per token" for key, name in sets.items()},
        "precision": environment.precision,
        "seed": environment.seed,
        "versions": ", ".join(f"{package} {version}" for package, version in environment.versions.items()),
        "commit": environment.commit,
    }
    counts = data["counts"]["train"]
    prepared = {
        "source": json.dumps(_shorten_files(data["source"])),
        **{key: f"{counts[key]:,}" for key in ("documents", "tokens")},
        **{key: data["request"][key] for key in ("packing", "separator")},
    }
    settings = {key: getattr(run_identity[key], "value", run_identity[key]) for key in SETTINGS if key in run_identity}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {name}",
        f"{model}, {origin}. These are the results of one seed. Other seeds give other results.",
        _table(facts),
        *_evaluation(rows, comparison, column),
        f"## Data\n\n{_table(prepared)}",
        f"## Recipe\n\n{_table(settings)}\n\nAll other settings are in `{RECIPE}` and `{ENVIRONMENT}` of the run.",
        *_deviations(environment.deviations),
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```',
        "## Limits\n\nThis is a base model. It continues text, but follows no instructions. It can repeat errors and "
        f"prejudice from its training data. Nothing was filtered for safety. Its context is {window:,} tokens.",
    ]
    # Absolute paths are shortened to their last part, because they are valid on one machine only.
    return re.sub(r"(?<![\w./-])/(?:[^\s/\"',=]+/)+", "", "\n\n".join(parts) + "\n")


def add_results(checkpoint: Checkpoint, comparison: Comparison) -> None:
    """Write the evaluation results of a final model into its model card.

    Results of a smoke test, or of weights that have changed since the evaluation, are ignored. If the card cannot be
    written, a warning is logged.
    """
    folder, record = Path(checkpoint.source), checkpoint.record
    if comparison.limit is None and checkpoint.form == "final" and record and training_record(folder) == record:
        card = model_card(folder.resolve().parent.name, record, comparison, checkpoint.name)
        try:
            write_whole(folder / "README.md", card)
        except OSError as error:
            logger.warning("Could not write the results to %s/README.md (%s).", folder, error.strerror)


def _rows(comparison: Comparison | None, column: str | None) -> list[ComparisonRow]:
    if comparison is None or column is None or comparison.limit is not None:
        return []
    return [row for row in comparison.rows if (score := row.values.get(column)) and score.value is not None]


def _results(rows: list[ComparisonRow], column: str) -> list[dict[str, Any]]:
    """Return the evaluation results in the format that the Hub uses in model cards."""
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


def _shorten_files(value: Any) -> Any:
    """Shorten the lists of file names in a data source's description.

    The first three names of a list are kept, followed by the number of omitted names.
    """
    if isinstance(value, Mapping) and isinstance(files := value.get("files"), list):
        names = [Path(file["path"]).name for file in files]
        value = {**value, "files": names[:3] + ([f"and {len(names) - 3} more"] if len(names) > 3 else [])}
    if isinstance(value, Mapping):
        return {key: _shorten_files(its) for key, its in value.items()}
    return [_shorten_files(item) for item in value] if isinstance(value, list) else value


def _deviations(found: Sequence[Mapping[str, str]] | None) -> list[str]:
    """Return the lines of the card that list the deviations from the default recipe."""
    if found is None:  # in runs of earlier versions
        return []
    default = "`recipes/gpt2_124m.yaml`, llm.c's GPT-2 124M on FineWeb"
    if not found:
        return [f"The training does not deviate from {default}."]
    shown = [its for its in found if its["field"] != "data.data_files"]  # paths that are valid on one machine only
    rows = [[Cell(its[key].replace("|", "/")) for key in ("field", "run", "recipe")] for its in shown]
    return [f"## Deviations from {default}\n\n{Table(['field', 'this run', 'recipe'], rows).markdown()}"]


def _table(facts: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items())])
