"""Mixtral's experts: the ones that are idle for a token, the loss that balances them, their names on disk."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from gpt2_repro.model.configuration import SAFELY


def idle_parameters(model: PreTrainedModel) -> int:
    """Return the number of weights in experts that a token is not routed to, 0 for a dense model."""
    if not isinstance(model, MixtralForCausalLM):
        return 0
    experts = sum(weight.numel() for weight in model.parameters() if weight.ndim == 3)
    return experts * (model.num_experts - model.num_experts_per_tok) // model.num_experts


def balance_loss(model: PreTrainedModel) -> Callable[[Any], Tensor] | None:
    """Return the function that computes the load-balancing loss from outputs of the base model with router logits.

    It is Mixtral's (Fedus et al. 2021, arXiv:2101.03961) times router_aux_loss_coef. None for a model without one.
    """
    if not isinstance(model, MixtralForCausalLM) or not (coefficient := model.config.router_aux_loss_coef):
        return None
    maybe_install_capturing_hooks(model.base_model)  # of router logits; torch.compile cannot install them
    return lambda outputs: (
        coefficient * load_balancing_loss_func(outputs.router_logits, model.num_experts, model.num_experts_per_tok)
    )


def load_experts(model: PreTrainedModel, checkpoint: str) -> bool:
    """Load the weights of a mixture of experts and return True, or return False for a dense model.

    transformers saves experts under other names. Trainer (5.23) skips those and continues with fresh experts.
    """
    if not isinstance(model, MixtralForCausalLM):
        return False
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint, **SAFELY).state_dict())
    return True
