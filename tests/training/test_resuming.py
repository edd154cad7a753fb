"""A run resumes from the right checkpoint and refuses wrong or unsafe ones."""

import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from transformers import TrainingArguments

from gpt2_repro.checkpoints import resuming
from gpt2_repro.checkpoints.resuming import RunIdentity, choose_start, refuse_code
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import LAUNCHERS
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.training.engine import fix_restored_optimizer
from gpt2_repro.training.inputs import training_loader


TRAJECTORY = {"seed": 1, "max_steps": 8, "n_layer": 2}
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states"


class Malicious:
    def __reduce__(self):
        return os.system, ("touch malicious",)


def test_pickle_that_would_run_code_is_not_loaded(save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose pickle could run code is refused."""
    monkeypatch.chdir(tmp_path)
    save(4)
    # The manifest is valid, because an attacker can also create a valid manifest.
    bad = save(8, {SHARD: {"m": torch.ones(3), "more": Malicious()}})
    with pytest.raises(UserError, match=rf"checkpoint-8/{SHARD}.pt .*(posix|os).system"):
        start_of(tmp_path)
    assert not (tmp_path / "malicious").exists()
    torch.load(bad / f"{SHARD}.pt", weights_only=False)  # DeepSpeed loads it in this way
    assert (tmp_path / "malicious").exists()


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Malicious(), protocol=4))
        file.writestr("archive/version", "3\n")


STATES = "global_step4/states.pt"
# A file of a checkpoint, and a function that makes it dangerous.
ATTACKS = {
    "a pickle": (STATES, lambda path: path.write_bytes(pickle.dumps(Malicious()))),
    "a pickle in a zip file": (STATES, archive),
    "junk": (STATES, lambda path: path.write_bytes(b"junk")),
    # transformers reads its own files safely. A file of DeepSpeed with the same name must be checked too.
    "a name of transformers": ("global_step4/optimizer.pt", lambda path: torch.save({"more": Malicious()}, path)),
    # DeepSpeed joins the text of `latest` to the folder without a check.
    "a pointer": ("latest", lambda path: path.write_text("../evil", encoding="utf-8")),
    "a link": ("link", lambda path: path.symlink_to(path.parents[1])),
    "not in the manifest": ("foreign", lambda path: path.touch()),
}


@pytest.mark.parametrize(("name", "attack"), ATTACKS.values(), ids=ATTACKS)
def test_checkpoint_with_dangerous_files_is_refused(name: str, attack, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / "global_step4").mkdir(parents=True)
    data = {"m": torch.ones(3, dtype=torch.bfloat16), "steps": [1, 2.5, None, True, "x", b"y", (1, 2)], "set": {3}}
    torch.save(data, checkpoint / STATES)
    (checkpoint / "latest").write_text("global_step4", encoding="utf-8")
    files = {"latest", STATES}
    refuse_code(checkpoint, files)
    attack(checkpoint / name)
    with pytest.raises(UserError, match=str(checkpoint / name)):
        refuse_code(checkpoint, files if name == "foreign" else files | {name})


def start_of(tmp_path: Path, *, launcher: str = "ddp", run_identity=TRAJECTORY, allow_change=False, **options: Any):
    identity = RunIdentity(run_identity, {"seed"}, allow_change)
    with (
        mock.patch.object(resuming, "current_launcher", lambda: LAUNCHERS[launcher]),
        mock.patch.object(RunRecord, "lock"),  # the exception that pytest keeps would keep the lock
    ):
        start = choose_start(RunRecord(tmp_path), identity, max_steps=8, **options)
    return start.step


def refused(match: str, *args, **asked) -> None:
    with pytest.raises(UserError, match=match):
        start_of(*args, **asked)


def test_start_is_the_newest_or_the_named_checkpoint(save, tmp_path: Path, caplog) -> None:
    assert start_of(tmp_path) == 0 and not caplog.messages
    (tmp_path / "run_status.json").write_text('{"step": 7, "state": "stopped"}', encoding="utf-8")
    assert start_of(tmp_path) == 0 and "step 7" in caplog.text  # its checkpoints were deleted
    save(2)
    (save(4) / "optimizer.pt").unlink()
    assert start_of(tmp_path) == 2
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()  # the run does not start again at step 0
    refused("checkpoint-4: optimizer.pt .*checkpoint-2: optimizer.pt", tmp_path)
    refused("checkpoint-2 .*optimizer.pt", tmp_path, resume_from="checkpoint-2")
    save(2)
    save(4)
    assert start_of(tmp_path) == 4 and start_of(tmp_path, resume_from="checkpoint-2") == 2
    assert start_of(tmp_path, resume_from=str(tmp_path / "checkpoint-2")) == 2
    for name in ("checkpoint-3", "final", str(tmp_path / "other" / "checkpoint-4"), "other/checkpoint-4"):
        refused("checkpoint-4.*--init_from", tmp_path, resume_from=name)
    save(9)
    refused("--max_steps", tmp_path, allow_change=True)


def test_checkpoint_of_another_run_or_engine_is_refused(save, tmp_path: Path) -> None:
    model = "zero_pp_rank_{}_mp_rank_00_model_states"
    forms = {"ddp": ["optimizer"], "zero1": ["mp_rank_00_model_states"], "fsdp2": ["pytorch_model_fsdp"]}
    forms["zero3"] = [model.format(0), model.format(1)]
    for step, (written, files) in enumerate(forms.items(), start=1):
        save(step, dict.fromkeys(files, {}))
        for launcher in forms:
            if launcher != written:
                refused(f"{written}.yaml", tmp_path, launcher=launcher)
        assert start_of(tmp_path, launcher=written) == step
    save(5, {"mp_rank_00_model_states": {}})
    refused("seed 1 -> 2.*--allow_resume_change", tmp_path, launcher="zero1", run_identity=TRAJECTORY | {"seed": 2})
    asked = {"launcher": "zero1", "allow_change": True}
    assert start_of(tmp_path, **asked, run_identity=TRAJECTORY | {"seed": 2}) == 5
    for changed, told in (
        ({"bf16": True}, "--precision fp32"),  # DeepSpeed cannot change it
        ({"seed": 2, "n_layer": 3}, r"seed 1 -> 2; n_layer 2 -> 3.*--output_dir\.$"),  # not all changes can be allowed
        ({"new": 3}, "another version"),
    ):
        refused(told, tmp_path, **asked, run_identity=TRAJECTORY | changed)


# The fused optimizer needs step counts on the device of the weights. DeepSpeed restores a universal checkpoint with
# step counts on the CPU or shared by parameters. The device `meta` simulates a GPU.
@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_restored_step_counts_are_separate_and_on_the_right_device(fused: bool | None, device: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)]
    optimizer, step = torch.optim.AdamW(weights), torch.tensor(7.0)
    for weight in weights:
        optimizer.state[weight] = {"step": step, "exp_avg": torch.ones(3, device="meta")}
    optimizer.param_groups[0]["fused"] = fused
    fix_restored_optimizer(torch.nn.Linear(1, 1), optimizer, weight_decay=0.1)
    steps = [optimizer.state[weight]["step"] for weight in weights]
    assert {step.device.type for step in steps} == {device} and steps[0] is not steps[1]


def test_the_dataloader_draws_no_global_random_number(tiny_data: Path) -> None:
    """A resumed run starts its dataloader once more, which must not change the dropout of later steps."""
    options = {"seed": 1, "data_seed": None, "train_sampling_strategy": "random"}
    options |= {"per_device_train_batch_size": 8, "dataloader_num_workers": 0, "dataloader_pin_memory": False}
    options |= {"dataloader_prefetch_factor": None, "dataloader_in_order": True, "device": torch.device("cpu")}
    rows, plan = PreparedData.read(tiny_data).rows("train"), BatchPlan(256, 32, 8, 1, 1, 8)
    loader, _ = training_loader(rows, plan, cast(TrainingArguments, SimpleNamespace(**options)), compiled=False)
    before = torch.get_rng_state()
    iter(loader)
    assert torch.equal(torch.get_rng_state(), before)
