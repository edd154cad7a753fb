"""lm-eval's index of tasks. A perplexity that is too large for a float is infinite, not an error."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.registry import get_aggregation
from lm_eval.tasks import TaskManager


# Aggregations of lm_eval/api/metrics.py (0.4.13) that raise OverflowError for more than 709 nats.
PERPLEXITIES = ("perplexity", "weighted_perplexity")


def _or_infinity(aggregate: Callable[[Sequence[Any]], float], items: Sequence[Any]) -> float:
    try:
        return aggregate(items)
    except OverflowError:
        return math.inf


class TaskIndex(TaskManager):
    """lm-eval's TaskManager, with tasks that keep their other metrics if a perplexity overflows."""

    def load(self, task_list: Any) -> Any:
        loaded = super().load(task_list)
        originals = [get_aggregation(name) for name in PERPLEXITIES]
        for task in loaded["tasks"].values():
            aggregations = task.aggregation()
            for metric, aggregate in aggregations.items():
                if aggregate in originals:
                    aggregations[metric] = functools.partial(_or_infinity, aggregate)
        return loaded
