"""Average the weights of the last steps."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

AVERAGE = "average"  # key of the optimizer's state, which checkpoints contain
AVERAGED_STEPS = "averaged_steps"  # key of each of its parameter groups


class WeightAverage(TrainerCallback):
    """Keeps an fp32 average of the weights in the state of the optimizer.

    The new average is average + f * (weights - average), where f = max(1 / steps, 1 / n) and n is the number of
    averaged steps. Up to n = steps, it is therefore the mean of the weights of all steps so far. Later, it is an
    exponential moving average. If `steps` is 0, there is no average.

    Under ZeRO-1 and ZeRO-2, each rank averages its part of the fp32 master weights.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._optimizer: Any = None
        self._zero: Any = None

    def attach(self, optimizer: Any, zero: Any) -> None:
        """Average the weights of torch's unwrapped optimizer, under DeepSpeed's `zero` or None."""
        self._optimizer = optimizer
        self._zero = zero

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.steps:
            return
        for group in self._optimizer.param_groups:
            self._update(group, state.global_step)

    def _update(self, group: dict[str, Any], steps_before: int) -> None:
        """Add the weights of a parameter group to their average, after `steps_before` steps without this one."""
        states = self._optimizer.state
        updated = [weight for weight in group["params"] if states[weight]]
        if not updated:  # all updates so far were skipped
            return
        new = [weight for weight in updated if AVERAGE not in states[weight]]
        # Older checkpoints have no count. They average from the first step.
        averaged_before = group.get(AVERAGED_STEPS, steps_before)
        if len(new) == len(updated):
            averaged_before = 0
            if steps_before:
                logger.warning("--ema_steps: the average begins at step %d.", steps_before + 1)
        for weight in new:
            states[weight][AVERAGE] = weight.detach().clone()
        averaged = averaged_before + 1
        group[AVERAGED_STEPS] = averaged
        averages = [states[weight][AVERAGE] for weight in updated]
        factor = max(1 / self.steps, 1 / averaged)
        update = get_ema_multi_avg_fn(1 - factor)
        update(averages, updated, 0)

    @property
    def exists(self) -> bool:
        """Whether there is an average of the weights."""
        if not self.steps or self._optimizer is None:
            return False
        states = self._optimizer.state
        return all(AVERAGE in states[weight] for weight in self._weights())

    def weights(self, model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
        """Return the average of each weight of `model` in fp32, by the weight's name. A collective.

        Under ZeRO, these are gathered copies on the CPU. Otherwise they are the tensors of the optimizer's state, which
        change in the next step. A rank without `keep` gets {}.
        """
        states = self._optimizer.state
        if self._zero is None:
            if not keep:
                return {}
            return {name: states[weight][AVERAGE] for name, weight in model.named_parameters()}
        # DeepSpeed (0.19.8) lists the states of each weight once, in its first step, when there is no average yet.
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()
        averages = {}
        for name, weight in model.named_parameters():
            average = weight.get_full_hp_param(AVERAGE)  # on all ranks
            if keep:
                averages[name] = average.to("cpu")
        return averages

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights of the model by the average, until the context ends.

        This is a collective: call it on all ranks.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight in self._weights():
            average = self._optimizer.state[weight][AVERAGE]
            trained = weight.clone()
            weight.copy_(average)
            average.copy_(trained)
        if self._zero is not None:
            self._zero.update_lp_params()

    def _weights(self) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = []
        for group in self._optimizer.param_groups:
            weights += group["params"]
        return weights
