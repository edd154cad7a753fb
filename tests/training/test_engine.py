"""What stands between the Trainer and the hardware."""

import torch

from gpt2_repro.training.engine import place_steps


def test_step_counts_lie_where_the_fused_update_looks_for_them() -> None:
    """After a resume in DeepSpeed's universal form they are on the CPU; `meta` stands for a GPU."""
    for fused, device in ((True, "meta"), (None, "cpu")):
        parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
        optimizer = torch.optim.AdamW([parameter])
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(3, device="meta")}
        optimizer.param_groups[0]["fused"] = fused
        place_steps(optimizer)
        assert optimizer.state[parameter]["step"].device.type == device
    place_steps(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], fused=True))  # before the first update
