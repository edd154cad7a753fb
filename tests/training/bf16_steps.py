"""Make a few steps with DeepSpeed's engine of GPUs (ZeRO-1 in bf16, fused AdamW) on a CPU, and write the results.

Usage: bf16_steps.py OUTPUT stock|ours

`stock` is DeepSpeed without changes. `ours` applies the changes of gpt2_repro to it, as PretrainingTrainer does.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from accelerate.utils import DeepSpeedOptimizerWrapper

from gpt2_repro.training import engine as engines
from gpt2_repro.training.guard import UpdateGuard
from tests.commands import ROOT


LIMIT = 0.5
# The factor of the loss of each micro-batch. With the limit, the second and the last step are clipped.
STEPS = [(0.01, 0.02), (3.0, 1.0), (float("nan"), 1.0), (0.02, 0.01), (1.0, float("inf")), (5.0, 2.0)]


class Calls:
    """Replace a function of `owner` by one that counts its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.count = 0
        self.function = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


class Waits(TorchDispatchMode):
    """Count the tensor values that are read as Python numbers. On a GPU, each would be a host sync."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero"):
            self.count += 1
        return function(*args, **(kwargs or {}))


def start() -> tuple[Any, torch.optim.Optimizer]:
    """Return DeepSpeed's engine for a small model, and torch's optimizer inside it."""
    engines.prepare_deepspeed(use_cpu=True)
    import deepspeed

    config = json.loads((ROOT / "ds_configs" / "zero1.json").read_text(encoding="utf-8"))
    config["bf16"]["enabled"] = True
    config["fp16"]["enabled"] = False
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = len(STEPS[0])
    config["gradient_clipping"] = LIMIT
    del config["train_batch_size"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    groups = [
        {"params": [weight for weight in model.parameters() if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in model.parameters() if weight.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    return engine, optimizer


def apply_changes(engine: Any, optimizer: torch.optim.Optimizer) -> UpdateGuard:
    """Apply the changes of gpt2_repro, as PretrainingTrainer does."""
    zero = engine.optimizer
    wrapper = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)  # it would need an Accelerator
    engines.skip_repeated_work(engine, engine.module, wrapper)
    engines.add_gradients_directly(zero)
    guard = UpdateGuard(lambda step, event: None)
    guard.attach(optimizer, zero)
    return guard


def main(output: Path, *, is_ours: bool) -> None:
    engine, optimizer = start()
    calls = {"train": Calls(engine.module, "train"), "zero_grad": Calls(engine, "zero_grad")}
    guard = apply_changes(engine, optimizer) if is_ours else None
    calls["add"] = Calls(engine.optimizer, "_update_hp_grad")
    generator = torch.Generator().manual_seed(1)
    results = []
    for step, factors in enumerate(STEPS, 1):
        waits = Waits()
        for index, factor in enumerate(factors):
            engine.train()
            outputs = engine(torch.randn(4, 8, generator=generator).bfloat16())
            engine.set_gradient_accumulation_boundary(is_boundary=index == len(factors) - 1)
            engine.backward((outputs.float() ** 2).mean() * factor)
        with waits:
            engine.step()
        norm = torch.as_tensor(engine.get_global_grad_norm())
        if guard is not None:
            guard.after_step(step, passed_over=False)
        engine.zero_grad()
        state = [optimizer.state[weight] for group in optimizer.param_groups for weight in group["params"]]
        tensors = {
            "norm": norm.float(),
            "masters": torch.cat([weight.detach() for group in optimizer.param_groups for weight in group["params"]]),
            "weights": torch.cat([weight.detach().flatten() for weight in engine.module.parameters()]),
            "first moments": torch.cat([entry["exp_avg"] for entry in state]),
            "second moments": torch.cat([entry["exp_avg_sq"] for entry in state]),
        }
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        results.append({"tensors": copies, "waits": waits.count})
    skipped = None
    if guard is not None:
        guard.settle()
        skipped = guard.skipped
    counts = {name: function.count for name, function in calls.items()}
    torch.save({"steps": results, "skipped": skipped, "calls": counts}, output)


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    main(Path(sys.argv[1]), is_ours=sys.argv[2] == "ours")
