"""Other libraries still have the private attributes that gpt2_repro uses.

`make upgrade-check` runs these tests with the newest transformers, accelerate and DeepSpeed.
"""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "gpt2_repro"
TRAINER = "transformers.trainer"
# Name -> the modules whose source contains it.
CONTRACT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("_created_lr_scheduler", "_get_grad_norm", "_get_output_dir"),
            *("_globalstep_last_logged", "_init_training_state", "_load_from_checkpoint", "_prepare_for_training"),
            *("_maybe_log_save_evaluate", "_run_epoch", "_save_checkpoint", "_tr_loss"),
        ),
        (TRAINER,),
    ),
    "_attn_implementation": ("transformers.configuration_utils",),
    "_n_gpu": ("transformers.training_args",),
    "_wandb": ("transformers.integrations.integration_utils",),
    "_shared_state": ("accelerate.state",),
    "_global_grad_norm": ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"),
    "_hp_mapping": ("deepspeed.utils.mixed_precision_linkage",),
    "_z3_optimizer": ("deepspeed.utils.tensor_fragment",),
    "_dynamo": ("torch._dynamo",),
    "_inductor": ("torch._inductor.config",),
    "_get_fsdp_state": ("torch.distributed.fsdp._fully_shard._fully_shard",),
    "_mp_policy": ("torch.distributed.fsdp._fully_shard._fsdp_state",),
    "_last_lr": ("torch.optim.lr_scheduler",),
    "_instances": ("tqdm.std",),
    **dict.fromkeys(("_loglikelihood_tokens", "_rank", "_world_size"), ("lm_eval.models.huggingface",)),
}
# Public attributes without documentation.
UNDOCUMENTED: dict[str, tuple[str, ...]] = {
    "clip_grad": ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.bf16_optimizer"),
    "fp32_partitioned_groups_flat": ("deepspeed.runtime.zero.stage3",),
    "__compatible_ops__": ("deepspeed.ops",),
    "get_full_hp_param": ("deepspeed.utils.tensor_fragment", "deepspeed.utils.mixed_precision_linkage"),
    "load_universal": ("deepspeed.runtime.constants",),
    "ds_id": ("deepspeed.runtime.zero.partition_parameters",),
    "compute_steps": ("transformers.trainer_callback",),
    "safe_save_file": ("transformers.modeling_utils",),
    "pytorch_model_fsdp": ("accelerate.utils.constants",),
    "_model_states": ("deepspeed.runtime.engine",),
    "found_inf": ("torch.optim.adamw",),
    "is_lomo_available": ("accelerate.optimizer",),
}  # fmt: skip
# The parameters of the methods that we override or call.
PARAMETERS = {
    "_get_output_dir": ["self", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_maybe_log_save_evaluate": [
        *("self", "tr_loss", "grad_norm", "model", "trial"),
        *("epoch", "ignore_keys_for_eval", "start_time", "learning_rate"),
    ],
    "_save_checkpoint": ["self", "model", "trial"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "log": ["self", "logs", "start_time"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
}
STANDARD_LIBRARY = {"_action_groups", "_actions", "_add_action", "_asdict", "_exit", "_fields", "_format_args"}
STANDARD_LIBRARY |= {"_group_actions", "_option_string_actions", "_replace"}


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is gone"
    return Path(spec.origin).read_text(encoding="utf-8")


def private_names() -> set[str]:
    """Return the private names of other libraries that gpt2_repro uses or overrides."""
    used, own = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                set_here = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                (own if set_here else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                used.update((node.module or "").split("."))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
                used.add(ast.unparse(node.args[1]).strip("'"))
    overridden = own & set(CONTRACT)
    private = {name for name in used if re.match(r"_[a-z]", name)}
    return (private - own - STANDARD_LIBRARY) | overridden


def test_the_contract_lists_what_the_package_uses() -> None:
    assert private_names() == set(CONTRACT)


@pytest.mark.parametrize("name", [*CONTRACT, *UNDOCUMENTED])
def test_upstream_still_has(name: str) -> None:
    for module in (CONTRACT | UNDOCUMENTED)[name]:
        if module.startswith("torch._"):
            assert importlib.util.find_spec(module), module
        else:
            assert re.search(rf"\b{re.escape(name)}\b", source_of(module)), f"{module} has no {name}"


def test_methods_of_trainer_take_what_they_took() -> None:
    from transformers import Trainer

    assert {name: list(inspect.signature(getattr(Trainer, name)).parameters) for name in PARAMETERS} == PARAMETERS


def test_the_classes_that_deepspeed_pickles_are_where_they_were() -> None:
    from gpt2_repro.training.resuming import DEEPSPEED_CLASSES

    for name in DEEPSPEED_CLASSES:
        module, _, kind = name.rpartition(".")
        assert re.search(rf"\bclass {kind}\b|\b{kind} = ", source_of(module)), name
