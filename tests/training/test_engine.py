"""Wrong optimizer state is corrected after a resume."""

import pytest
import torch

from gpt2_repro.training.engine import fix_restored_optimizer, skip_repeated_work


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


def test_training_mode_is_set_again_after_a_validation() -> None:
    """The engine sets training mode only if the inner model is in evaluation mode."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    wrapped = torch.nn.Sequential(model)
    visits = []
    original = wrapped.train
    wrapped.train = lambda mode=True: (visits.append(mode), original(mode))[1]
    weight = torch.nn.Parameter(torch.ones(2))
    skip_repeated_work(wrapped, model, torch.optim.SGD([weight]))
    assert wrapped.train() is wrapped and not visits
    model.eval()
    assert not model[0].training and wrapped.train() is wrapped and model[0].training and visits == [True]
    wrapped.eval()
    assert not model[0].training and visits == [True, False]
    weight.sum().backward()
    wrapped.zero_grad()
    assert weight.grad is None
