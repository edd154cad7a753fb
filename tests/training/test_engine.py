"""Wrong optimizer state is corrected after a resume."""

import pytest
import torch

from gpt2_repro.training.engine import fix_restored_optimizer


# The fused optimizer needs step counts on the device of the weights. DeepSpeed restores a universal checkpoint with
# step counts on the CPU or shared by parameters. The device `meta` simulates a GPU.
@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_restored_step_counts_are_separate_and_on_the_right_device(fused, device: str) -> None:
    """Each parameter gets a separate step count on the device where it is needed."""
    weights = [torch.nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
    optimizer, step = torch.optim.AdamW(weights), torch.tensor(7.0)
    for weight in weights:
        optimizer.state[weight] = {"step": step, "exp_avg": torch.ones(3, device="meta")}
    optimizer.param_groups[0]["fused"] = fused
    fix_restored_optimizer(torch.nn.Linear(1, 1), optimizer, weight_decay=0.1)
    steps = [optimizer.state[weight]["step"] for weight in weights]
    assert {step.device.type for step in steps} == {device} and steps[0] is not steps[1]
