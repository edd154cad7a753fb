"""What stands between the Trainer and the hardware."""

from types import SimpleNamespace

import torch

from gpt2_repro.training.engine import mend_loaded


PLAIN = torch.nn.Linear(1, 1)


def test_step_counts_lie_where_the_update_looks_for_them_and_are_each_groups_own() -> None:
    """After a resume in DeepSpeed's universal form they are on the CPU, or shared; `meta` stands for a GPU."""
    for fused, device in ((True, "meta"), (None, "cpu")):
        weights = [torch.nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
        optimizer, step = torch.optim.AdamW(weights), torch.tensor(7.0)
        for weight in weights:
            optimizer.state[weight] = {"step": step, "exp_avg": torch.ones(3, device="meta")}
        optimizer.param_groups[0]["fused"] = fused
        mend_loaded(PLAIN, optimizer, weight_decay=0.1)
        steps = [optimizer.state[weight]["step"] for weight in weights]
        assert {step.device.type for step in steps} == {device} and steps[0] is not steps[1]
    mend_loaded(PLAIN, torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], fused=True), weight_decay=0.1)


def engine_of_stage(stage: int) -> torch.nn.Module:
    methods = {"zero_optimization_stage": lambda self: stage, "gradient_clipping": lambda self: 0.1}
    engine = type("DeepSpeedEngine", (SimpleNamespace,), methods)()
    engine.optimizer = SimpleNamespace(clip_grad=1.0)  # of the checkpoint
    return engine


def test_the_clipping_limit_is_the_recipes() -> None:
    for stage in (1, 2, 3):
        engine = engine_of_stage(stage)
        mend_loaded(engine, torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), weight_decay=0.1)
        assert engine.optimizer.clip_grad == 0.1


def test_under_zero3_biases_keep_no_decay() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(3))]} for _ in range(2)], weight_decay=0.1
    )
    engine = engine_of_stage(3)
    mend_loaded(PLAIN, optimizer, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]
    mend_loaded(engine, optimizer, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    matrices_alone = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], weight_decay=0.1)
    mend_loaded(engine, matrices_alone, weight_decay=0.1)
    assert [group["weight_decay"] for group in matrices_alone.param_groups] == [0.1]
