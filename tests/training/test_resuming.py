"""Which checkpoint a run goes on from, and which one it will not touch."""

import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_repro.compute import plan_batches
from gpt2_repro.errors import UserError
from gpt2_repro.training import resuming
from gpt2_repro.training.checkpoints import publish, seal
from gpt2_repro.training.resuming import choose_start, find_start, refuse_code


PLAN = plan_batches(tokens_per_step=100, sequence_length=10, micro_batch_size=10, num_processes=1, max_steps=8)
TRAJECTORY = {"seed": 1, "max_steps": 8}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "broadcast_object_list", lambda objects: objects)


@pytest.fixture
def save(tmp_path: Path):
    def run(step: int, *, processes: int | None = None, extensions=(), **states: object) -> Path:
        staged = tmp_path / "staging" / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        for name, state in ({"optimizer": {"m": torch.ones(3)}} | states).items():
            torch.save(state, staged / f"{name}.pt")
        seal(staged, {}, trajectory=TRAJECTORY | {"extensions": list(extensions)}, deepspeed_processes=processes)
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return run


class Malicious:
    def __reduce__(self):
        return os.system, ("touch malicious",)


def test_a_pickle_that_would_run_code_is_not_loaded(save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SE1. The manifest is in order: whoever made the folder made that too."""
    monkeypatch.chdir(tmp_path)
    save(4)
    shard = "zero_pp_rank_0_mp_rank_00_optim_states"
    bad = save(8, **{shard: {"m": torch.ones(3), "more": Malicious()}})
    with pytest.raises(UserError, match=r"checkpoint-8/zero_pp.*names (posix|os).system: loading it would run code"):
        find_start(tmp_path)
    assert not (tmp_path / "malicious").exists()
    torch.load(bad / f"{shard}.pt", weights_only=False)  # what deepspeed would do
    assert (tmp_path / "malicious").exists()


def test_what_cannot_be_taken_apart_is_refused_too(tmp_path: Path) -> None:
    for name, content in {
        "plain": pickle.dumps(Malicious()),
        "stack_global": pickle.dumps(Malicious(), protocol=4),
        "not_a_pickle": b"junk",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mp_rank_00_model_states.pt").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            refuse_code(folder, ["mp_rank_00_model_states.pt"])
        with zipfile.ZipFile(folder / "mp_rank_00_model_states.pt", "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
        with pytest.raises(UserError, match="would run code"):
            refuse_code(folder, ["mp_rank_00_model_states.pt"])


def test_data_alone_is_no_code(tmp_path: Path) -> None:
    state = {"m": torch.ones(3, dtype=torch.bfloat16), "steps": [1, 2.5, None, True, "x", b"y", (1, 2)], "set": {3}}
    torch.save(state, tmp_path / "model_states.pt")
    refuse_code(tmp_path, ["model_states.pt"])


def test_nothing_leads_out_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / "global_step4").mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step4")
    refuse_code(checkpoint, ["latest"])
    (checkpoint / "latest").write_text("../evil")  # deepspeed joins it to the folder as it is
    with pytest.raises(UserError, match="Unexpected file .*latest"):
        refuse_code(checkpoint, ["latest"])
    (checkpoint / "latest").write_text("global_step4")
    (checkpoint / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="Unexpected file .*link"):
        refuse_code(checkpoint, ["latest", "link"])
    (checkpoint / "link").unlink()
    torch.save({}, checkpoint / "global_step4" / "more.pt")
    with pytest.raises(UserError, match="Unexpected file .*more.pt"):
        refuse_code(checkpoint, ["latest"])
    # Transformers reads its own files with care; deepspeed's may not hide behind their names.
    torch.save({"more": Malicious()}, checkpoint / "global_step4" / "optimizer.pt")
    (checkpoint / "global_step4" / "more.pt").unlink()
    with pytest.raises(UserError, match="would run code"):
        refuse_code(checkpoint, ["latest", "global_step4/optimizer.pt"])


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(save, tmp_path: Path) -> None:
    (save(4) / "optimizer.pt").unlink()
    with pytest.raises(
        UserError, match="no complete checkpoint .*checkpoint-4: optimizer.pt is missing.* move them away"
    ):
        find_start(tmp_path)


def start_of(tmp_path: Path, plan=PLAN, *, launcher: str = "ddp", **asked: object):
    args = SimpleNamespace(resume_from="", process_index=0, extend_to=0, allow_resume_change=False, launcher=launcher)
    vars(args).update(asked)
    trajectory = dict(TRAJECTORY)
    start, plan = choose_start(SimpleNamespace(path=tmp_path, lock=lambda: None), args, plan, trajectory)
    assert args.max_steps == plan.max_steps
    return start, plan, trajectory["extensions"]


def test_the_beginning_where_there_is_nothing(tmp_path: Path) -> None:
    start, plan, extensions = start_of(tmp_path)
    assert (start.checkpoint, start.step, plan.max_steps, extensions) == (None, 0, 8, [])


def test_the_newest_or_the_named_one(save, tmp_path: Path) -> None:
    save(2)
    save(4)
    assert start_of(tmp_path)[0].step == 4
    assert start_of(tmp_path, resume_from="checkpoint-2")[0].step == 2
    with pytest.raises(UserError, match="has no checkpoint checkpoint-3"):
        start_of(tmp_path, resume_from="checkpoint-3")


def test_a_run_is_extended_from_where_it_is_and_again_from_there(save, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is none: use --total_tokens"):
        start_of(tmp_path, extend_to=1600)
    save(8)
    assert start_of(tmp_path, extend_to=1600)[1:] == (PLAN.__class__(**vars(PLAN) | {"max_steps": 16}), [[8, 16]])
    with pytest.raises(UserError, match="ends at step 4, and the run goes to step 8 without it"):
        start_of(tmp_path, extend_to=400)
    save(12, extensions=[[8, 16]])
    assert start_of(tmp_path, extend_to=1600)[2] == [[8, 16]]  # the same command again
    assert start_of(tmp_path, extend_to=2000)[2] == [[8, 16], [12, 20]]
    with pytest.raises(UserError, match="was extended: type --extend_to 1600 to go on"):
        start_of(tmp_path)


def test_a_run_does_not_end_before_its_checkpoint(save, tmp_path: Path) -> None:
    save(9)
    with pytest.raises(UserError, match="is beyond --max_steps 8"):
        start_of(tmp_path, allow_resume_change=True)


def test_another_run_or_engine_is_refused(save, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(4, processes=2)
    with pytest.raises(UserError, match="was written with DeepSpeed: launch with zero1.yaml"):
        start_of(tmp_path)
    assert start_of(tmp_path, launcher="zero1")[0].step == 4
    TRAJECTORY["bf16"] = True
    with pytest.raises(UserError, match="--bf16 None"):  # DeepSpeed cannot change it: the flag is not offered
        start_of(tmp_path, launcher="zero1", allow_resume_change=True)
    del TRAJECTORY["bf16"]
    save(5)
    with pytest.raises(UserError, match="was written without DeepSpeed: launch with ddp.yaml"):
        start_of(tmp_path, launcher="zero1")
    TRAJECTORY["seed"] = 2
    try:
        with pytest.raises(UserError, match=r"belongs to another run \(seed 1 -> 2\).*--allow_resume_change"):
            start_of(tmp_path)
        assert start_of(tmp_path, allow_resume_change=True)[0].step == 5
        assert "goes on as another run: seed 1 -> 2" in caplog.text
    finally:
        TRAJECTORY["seed"] = 1
    shards = {f"zero_pp_rank_{rank}_mp_rank_00_model_states": {} for rank in range(2)}
    save(6, processes=2, **shards)
    assert start_of(tmp_path, launcher="zero3")[0].step == 6
    with pytest.raises(UserError, match="was written with ZeRO-3: launch with zero3.yaml"):
        start_of(tmp_path, launcher="zero1")
    save(7, pytorch_model_fsdp={})
    assert start_of(tmp_path, launcher="fsdp2")[0].step == 7
    with pytest.raises(UserError, match="was written with FSDP2: launch with fsdp2.yaml"):
        start_of(tmp_path)
