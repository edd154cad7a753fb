"""The report in a few lines for the terminal."""

from pathlib import Path

from gpt2_repro.comparison import comparison_table
from gpt2_repro.report.facts import (
    facts,
    hellaswag_lines,
    loss_text,
    progress,
    reference_name,
    where_things_are,
)
from gpt2_repro.report.read import Run
from gpt2_repro.report.tables import Table, aligned
from gpt2_repro.time_breakdown import breakdown_lines
from gpt2_repro.units import duration


def summary(run: Run, page: Path) -> list[str]:
    """State, loss beside its references, speed, evaluation, and where everything is, each path on its own line."""
    numbers = facts(run)
    lines = [f"{run.name}: {numbers.state}, {progress(numbers)}"]
    if numbers.reason:
        lines.append(f"  {numbers.reason}")
    if run.non_finite_steps:
        lines.append(f"  the loss was not finite at {len(run.non_finite_steps)} steps")
    if numbers.validation_loss is not None:
        references = sorted(run.reference_losses.items(), key=lambda item: item[1])
        beside = ", ".join(f"{reference_name(name)} {loss_text(loss)}" for name, loss in references)
        lines.append(
            f"  validation loss {loss_text(numbers.validation_loss)} nats/token" + (f"; {beside}" if beside else "")
        )
    for name, loss in numbers.further_losses.items():
        lines.append(f"  validation loss of {name} {loss_text(loss)} nats/token")
    if numbers.hellaswag is not None:
        of = f" of {numbers.hellaswag_items:,} items" if numbers.hellaswag_items else ""
        beside = ", ".join(f"{name} {value:.4f}" for name, value in hellaswag_lines(run).items())
        lines.append(f"  HellaSwag {numbers.hellaswag:.4f}{of}" + (f"; {beside}" if beside else ""))
    if numbers.tokens_per_second is not None:
        lines.append(f"  median {numbers.tokens_per_second:,.0f} tokens/s, {duration(numbers.seconds)} wall time")
    lines += [f"  {line}" for line in breakdown_lines(run.accounts, usd_per_hour=run.usd_per_hour)]
    if run.comparison.get("rows"):
        lines += ["", *(f"  {line}" for line in aligned(Table(*comparison_table(run.comparison)))), ""]
        if run.comparison.get("limit"):
            lines.append(
                f"  only the first {run.comparison['limit']} examples of each task: no published number compares"
            )
    lines += [f"  {sentence}" for sentence in run.missing().values()]
    places = where_things_are(run) | {"report": page}
    return lines + [f"  {name:<11}{path}" for name, path in places.items()]
