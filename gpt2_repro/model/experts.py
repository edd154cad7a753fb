"""What a mixture of experts has beside other models: experts that idle, a loss that keeps them all at work, weights that
lie on the disk under other names.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.output_capturing import maybe_install_capturing_hooks


def idle_parameters(model: PreTrainedModel) -> int:
    """Weights of experts that a token does not go to; 0 where there are no experts."""
    experts = getattr(model, "num_experts", 0)
    stacked = [weight for weight in model.parameters() if experts and weight.ndim == 3 and len(weight) == experts]
    return sum(weight.numel() * (experts - model.num_experts_per_tok) // experts for weight in stacked)


def balance_loss(model: PreTrainedModel) -> Callable[[Any], Tensor] | None:
    """Of the outputs of the base model, which must have their router logits, the architecture's own loss (Fedus et al.
    2021, arXiv:2101.03961) times the configuration's router_aux_loss_coef. None for a model that has none.
    """
    coefficient = getattr(model.config, "router_aux_loss_coef", None)
    # By this name in the modules of all such architectures of transformers (5.23); their forward has no part without logits.
    loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if not coefficient or loss is None:
        return None
    maybe_install_capturing_hooks(model.base_model)  # of router logits; torch.compile cannot do it on its way
    return lambda outputs: coefficient * loss(outputs.router_logits, model.num_experts, model.num_experts_per_tok)


def take_up_renamed(model: PreTrainedModel, checkpoint: str) -> bool:
    """Load a checkpoint's weights where transformers saves the model's under other names than they have in it.

    Trainer would pass over those (transformers 5.23), and train on with fresh experts.
    """
    if not get_model_conversion_mapping(model, add_legacy=False):
        return False
    saved = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    model.load_state_dict(saved.state_dict())
    return True
