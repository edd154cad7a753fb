"""Choose the optimizer."""

from typing import Any

from transformers import PreTrainedModel

from gpt2_repro.optim import MARS, OWN_OPTIMIZERS
from gpt2_repro.optim.mars import MarsAdamW
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces
from gpt2_repro.training.engine import let_zero_use
from gpt2_repro.training.pretraining_arguments import PretrainingArguments


def own_optimizer(model: PreTrainedModel, args: PretrainingArguments) -> tuple[type, dict[str, Any]] | None:
    """Return the class and the options of Muon or MARS, or None for other optimizers.

    The result is for Trainer's argument `optimizer_cls_and_kwargs`.
    """
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim not in OWN_OPTIMIZERS:
        return None
    if args.deepspeed_plugin is not None:
        let_zero_use(MuonWithAdamW, MarsAdamW)
    if args.optim == MARS:
        return MarsAdamW, options
    return MuonWithAdamW, options | {"pieces": count_pieces(model), "momentum": args.muon_momentum}
