"""Group runs that differ only in the seed, and compare the groups."""

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence

from gpt2_repro.report.read import Run, last_value
from gpt2_repro.text import Cell, Table


@dataclasses.dataclass
class Setting:
    """Runs that differ only in the seed, and their labels."""

    runs: list[Run] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The last validation losses of the weights in final/."""
        losses: list[float] = []
        for run in self.runs:
            loss = last_value(run.validation, "eval_EMA_loss")
            if loss is None:
                loss = last_value(run.validation, "eval_loss")
            if loss is not None:
                losses.append(loss)
        return losses

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def name(self) -> str:
        """The label of a single run, or the common beginning and end of the labels."""
        if len(self.labels) == 1:
            return self.labels[0]
        start = os.path.commonprefix(self.labels).rstrip("0123456789")  # 42 and 43 begin with the same digit
        backwards = [label[len(start) :][::-1] for label in self.labels]
        end = os.path.commonprefix(backwards)[::-1].lstrip("0123456789")
        return f"{start}*{end}"

    @property
    def loss(self) -> str:
        """The mean loss as text, ± the standard deviation over the seeds."""
        return mean_as_text(self.losses)


def mean_as_text(numbers: Sequence[float]) -> str:
    """Return the mean of the values of several seeds, ± their standard deviation."""
    mean = statistics.fmean(numbers)
    if len(numbers) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {statistics.stdev(numbers):.4f}"


def group(runs: Sequence[Run], labels: Sequence[str]) -> list[Setting]:
    """Return the settings of the runs, in order. Of runs with equal seeds, the first is counted."""
    settings: dict[str, Setting] = {}
    for run, label in zip(runs, labels, strict=True):
        setting = settings.setdefault(run.setting, Setting())
        seed_pairs = [other.seed_pair for other in setting.runs]
        if run.seed_pair not in seed_pairs:
            setting.runs.append(run)
            setting.labels.append(label)
    return list(settings.values())


def setting_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the mean loss of each setting, and its difference from the setting with the lowest mean.

    Runs have the same setting if they differ only in the seed. Of runs with equal seeds, the first is counted. The
    seeds are the unit: the interval is Tukey's for all pairs of settings, with the standard deviation of all settings
    together, because the lowest mean of several settings is partly luck. For two settings it is Student's. All runs
    validate on the same rows.
    """
    from scipy import stats

    table = Table(["setting", "seeds", "validation loss", "difference, 95 % interval", "verdict"], [])
    if len(runs) < 2:
        return table
    settings = [setting for setting in group(runs, labels) if setting.losses]
    settings.sort(key=lambda setting: setting.mean)
    if not settings:
        return table
    best = settings[0]
    squares: list[float] = []
    for setting in settings:
        for loss in setting.losses:
            squares.append((loss - setting.mean) ** 2)
    freedom = len(squares) - len(settings)
    for setting in settings:
        difference = setting.mean - best.mean
        shown = f"{difference:+.4f}"
        if setting is best:
            shown = "–"
            verdict = ""
        elif freedom:
            variance = sum(squares) / freedom
            inverse_seeds = 1 / len(setting.losses) + 1 / len(best.losses)
            error = math.sqrt(variance * inverse_seeds / 2)
            half = error * stats.studentized_range.ppf(0.95, len(settings), freedom)
            shown += f" ± {half:.4f}"
            verdict = "higher" if difference > half else "within the seeds"
        else:
            verdict = "one seed each: unknown"
        seeds = str(len(setting.losses))
        texts = [setting.name, seeds, setting.loss, shown, verdict]
        table.rows.append([Cell(text) for text in texts])
    return table
