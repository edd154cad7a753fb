"""What the page shows of one run, as the words and tables that its template sets."""

import dataclasses
import json
from typing import Any

from gpt2_repro.report.facts import (
    Facts,
    baseline_losses,
    count,
    facts,
    hellaswag_lines,
    loss_text,
    progress,
    reference_name,
    where_things_are,
)
from gpt2_repro.report.read import COMPARISON, DIAGNOSIS, Row, Run, is_number, mapping, reading
from gpt2_repro.report.tables import (
    bill_table,
    comparison_table,
    count_table,
    deviation_table,
    flatten,
    validation_table,
)
from gpt2_repro.units import duration


# Parts of environment.json that stand elsewhere on the page, or in a sentence.
HAVE_PLACES = ("data", "versions", "accelerator", "plan", "deviations", "trajectory")
STATE_MARKS = {"complete": "✓", "running": "●", "stopped": "■", "failed": "✕", "diverged": "✕"}


@dataclasses.dataclass(frozen=True)
class Tile:
    """One key number: what it is, the number, its unit or what it is measured against."""

    label: str
    value: str
    note: str


def view_run(run: Run, label: str) -> dict[str, Any]:
    """What the template shows of one run."""
    numbers = facts(run)
    samples = sorted(run.samples, key=lambda row: -row["step"])
    with reading(run.path / COMPARISON):
        comparison = comparison_table(run.comparison) if run.comparison else None
    with reading(run.path / DIAGNOSIS):
        captions = _diagnosis_captions(run)
    return {
        "label": label,
        "run": run,
        "numbers": numbers,
        "mark": STATE_MARKS.get(numbers.state, "?"),
        "progress": progress(numbers),
        "left": duration(numbers.seconds_left) if numbers.seconds_left is not None else None,
        "tiles": _tiles(run, numbers),
        "references": [(reference_name(name), loss_text(loss)) for name, loss in run.reference_losses.items()],
        "validation": validation_table(run),
        "samples": samples,
        "newest": samples[0]["step"] if samples else None,
        "has_hellaswag_lines": bool(hellaswag_lines(run)),
        "baselines": _baseline_sentences(run),
        "captions": captions,
        "bill": bill_table(run),
        "price": f"${run.usd_per_hour:,.2f} an hour" if run.usd_per_hour else None,
        "deviations": deviation_table(run) if isinstance(run.environment.get("deviations"), list) else None,
        "comparison": comparison,
        "data": _data_rows(run),
        "counts": count_table(mapping(run.environment.get("data"))),
        "environment": _environment_rows(run),
        "environment_json": json.dumps(run.environment, indent=2, ensure_ascii=False),
        "missing": run.missing(),
        "files": [{"key": name, "value": path} for name, path in where_things_are(run).items()],
    }


def _tiles(run: Run, numbers: Facts) -> list[Tile]:
    loss, bigram = numbers.validation_loss, run.reference_losses.get("bigram")
    tiles = [Tile("Validation loss", loss_text(loss), "nats per token")]
    further = numbers.further_losses.items()
    tiles += [Tile(f"Validation, {name}", loss_text(value), "nats per token") for name, value in further]
    if loss is not None and bigram is not None:
        word = "below" if loss < bigram else "above"
        note = f"nats per token, {word} its {loss_text(bigram)}"
        if (unigram := run.reference_losses.get("unigram")) is not None:
            note += f"; unigram {loss_text(unigram)}"
        tiles.append(Tile(f"vs {reference_name('bigram')}", f"{loss - bigram:+.3f}".replace("-", "−"), note))
    if numbers.hellaswag is not None:
        beside = [f"{name} {value:.4f}" for name, value in hellaswag_lines(run).items()]
        of = f"of {numbers.hellaswag_items:,} items" if numbers.hellaswag_items else "accuracy"
        tiles.append(Tile("HellaSwag", f"{numbers.hellaswag:.4f}", ", ".join(beside) or of))
    of = f"of {count(numbers.total_tokens)} planned" if numbers.total_tokens else "tokens"
    tiles.append(Tile("Tokens seen", count(numbers.tokens), of))
    tiles.append(Tile("Parameters", count(numbers.parameters), "as trained"))
    tiles.append(Tile("Time", duration(numbers.seconds), "wall time"))
    if numbers.usd is not None:
        tiles.append(Tile("Cost", f"${numbers.usd:,.2f}", f"at ${run.usd_per_hour:,.2f} an hour"))
    if numbers.tokens_per_second is not None:
        tiles.append(Tile("Speed", f"{numbers.tokens_per_second:,.0f}", "tokens/s, median"))
    if numbers.mfu is not None:
        tiles.append(Tile("MFU", f"{numbers.mfu:.1%}", "of the peak FLOP/s, median"))
    if numbers.padding is not None:
        tiles.append(Tile("Padding", f"{numbers.padding:.1%}", "of the computed positions, median"))
    return tiles


def _baseline_sentences(run: Run) -> list[str]:
    return [
        f"Dashed, baseline: {run.diagnosis['models'][1]['name']}, by the difference that the diagnosis measured."
        if name == "baseline"
        else f"Dashed, {name}: OpenAI's model on this validation set, as published (gpt2_repro/baselines.py)."
        for name in baseline_losses(run)
    ]


def _diagnosis_captions(run: Run) -> dict[str, str]:
    """What each figure of a diagnosis shows."""
    if not run.diagnosis:
        return {}
    name, baseline = (model["name"] for model in run.diagnosis["models"][:2])
    same = f"{name} and {baseline} on the same tokens"
    return {
        "diagnosis_domains": f"{same}, by domain; below, the difference with its 95 % interval.",
        "diagnosis_positions": f"{same}, by position in the window.",
        "diagnosis_frequencies": f"{same}, by how often a token stands in {run.diagnosis['frequencies_of']}.",
        "diagnosis_document_start": f"{same}, behind the start of a document; dotted: without a start token.",
    }


def _data_rows(run: Run) -> list[Row]:
    """The manifest's entries; counts and reference losses have places of their own."""
    manifest = mapping(run.environment.get("data"))
    entries = {key: value for key, value in manifest.items() if key not in ("counts", "reference_losses")}
    return [{"key": key, "value": _text(value)} for key, value in flatten(entries).items()]


def _environment_rows(run: Run) -> list[Row]:
    """Everything in environment.json but the data; accelerator and plan as a sentence, then the versions."""
    environment = run.environment
    rows = {key: value for key, value in environment.items() if key not in HAVE_PLACES}
    if "flops_per_token" in rows:
        rows["flops_per_token"] = count(rows["flops_per_token"])
    rows |= {"accelerator": _accelerator(mapping(environment.get("accelerator")))}
    rows |= {"tokens per step": _plan(mapping(environment.get("plan")))}
    rows |= mapping(environment.get("versions"))
    return [
        {"key": key.replace("_", " "), "value": _text(value)}
        for key, value in flatten(rows).items()
        if value is not None
    ]


def _accelerator(accelerator: Row) -> str | None:
    """`2 × NVIDIA H100 80GB HBM3 (cuda), 80 GiB and 989 TFLOP/s each`."""
    if not accelerator:
        return None
    capacities = []
    if accelerator.get("memory_bytes"):
        capacities.append(f"{accelerator['memory_bytes'] / 2**30:,.0f} GiB")
    if accelerator.get("peak_flops"):
        capacities.append(f"{accelerator['peak_flops'] / 1e12:,.0f} TFLOP/s")
    each = f", {' and '.join(capacities)} each" if capacities else ""
    return f"{accelerator.get('count', 1)} × {accelerator.get('name')} ({accelerator.get('kind')}){each}"


def _plan(plan: Row) -> str | None:
    needed = ("micro_batch_size", "sequence_length", "num_processes", "gradient_accumulation_steps", "tokens_per_step")
    if not all(is_number(plan.get(key)) for key in needed):
        return None
    if plan.get("by_length"):
        positions = plan["micro_batch_size"] * plan["sequence_length"]
        passes = plan["num_processes"] * plan["gradient_accumulation_steps"]
        return f"{plan['tokens_per_step']:,} without padding, in {passes:,} passes of at most {positions:,} positions"
    rows = (
        f"{plan['micro_batch_size']:,} rows × {plan['sequence_length']:,} tokens × {plan['num_processes']:,} processes"
    )
    steps = f"{plan['gradient_accumulation_steps']:,} accumulation steps"
    return f"{rows} × {steps} = {plan['tokens_per_step']:,} tokens"


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
