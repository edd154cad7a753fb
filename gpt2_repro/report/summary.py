"""The report as lines for the terminal."""

from pathlib import Path

from gpt2_repro.report.facts import facts, key_numbers, where_things_are
from gpt2_repro.report.read import Run
from gpt2_repro.report.tables import aligned
from gpt2_repro.time_breakdown import breakdown_lines


def summary(run: Run, page: Path) -> list[str]:
    """Return state, key numbers, time, evaluation, missing parts and paths of a run."""
    its = facts(run)
    lines = [f"{run.name}: {its.state}, {its.progress}"]
    lines += [f"  {its.reason}"] if its.reason else []
    if run.non_finite_steps:
        lines.append(f"  the loss was not finite at {len(run.non_finite_steps)} steps")
    lines += [f"  {label:<28} {text:>11}  {note}".rstrip() for label, text, note in key_numbers(run)]
    lines += [f"  {line}" for line in breakdown_lines(run.status.time_breakdown, usd_per_hour=run.usd_per_hour)]
    if run.comparison and run.comparison.rows:
        lines += ["", *(f"  {line}" for line in aligned(run.comparison.table())), ""]
    if run.comparison and run.comparison.limit:
        lines.append(
            f"  scored on the first {run.comparison.limit} examples of each task: do not compare with published numbers"
        )
    lines += [f"  {sentence}" for sentence in run.missing().values()]
    return lines + [f"  {name:<11}{path}" for name, path in (where_things_are(run) | {"report": page}).items()]
