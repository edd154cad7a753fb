"""Mistakes in launcher files are refused, even if libraries silently ignore them."""

import functools
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock, call

import psutil
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

from gpt2_repro.errors import UserError
from gpt2_repro.launchers import LAUNCHERS, current_launcher
from gpt2_repro.planning.batch_plan import plan_batches
from gpt2_repro.recipe import load_recipe
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.training import launch_checks, settings
from gpt2_repro.training.engine import check_engine
from gpt2_repro.training.launch_checks import LAUNCHER_DIED, check_deepspeed_json, check_launcher, end_with_launcher
from gpt2_repro.training.settings import check_optimizer, resolve_settings


ROOT = Path(__file__).parents[2]
ZERO1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text(encoding="utf-8"))
MASTERS = "bf16_master_weights_and_grads"


OF_ZERO = ("compute_grad_norm", "round_robin_gradients", "parameter_alignment")
# Settings of a DeepSpeed JSON that are refused, and the key in the message.
REFUSED: list = [
    ("gradient_clipping", {"gradient_clipping": None}),
    *((key, {"zero_optimization": {"stage": 1, key: True}}) for key in OF_ZERO),
    ("compute_grad_norm", {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}),
    ("grad_accum_dtype", {"data_types": {"grad_accum_dtype": "fp16"}}),
    *(("bf16", {"bf16": value}) for value in ({"enabled": True}, {"enabled": "auto", MASTERS: True})),
]
OTHERS = {"gradient_accumulation_steps": 4, "communication_data_type": "fp16", "optimizer": {"type": "AdamW"}}
OTHERS |= {"scheduler": {"type": "WarmupDecayLR"}, "fp16": {"enabled": True}, "checkpoint": {"tag": 1}}
REFUSED += [(key, {key: value}) for key, value in OTHERS.items()]


@pytest.mark.parametrize(("told", "change"), REFUSED, ids=str)
def test_deepspeed_json_with_ignored_or_wrong_settings_is_refused(told: str, change: dict, tmp_path: Path) -> None:
    config = {name: value for name, value in (ZERO1 | change).items() if value is not None}
    (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=told):
        check_deepspeed_json(tmp_path / "mine.json")


PYTHON = "python3.12"
OTHER_USER = PermissionError()
# The variable that the launcher sets, the programs of the worker's parent, its parent and so on, and whether it trains.
PARENTS = {
    "a launcher": ("TORCHELASTIC_RUN_ID", [PYTHON, "bash", OTHER_USER], True),
    "torchrun --no-python wrapper.sh": ("TORCHELASTIC_RUN_ID", ["dash", PYTHON, "bash", OTHER_USER], True),
    "a dead launcher": ("TORCHELASTIC_RUN_ID", [OTHER_USER], False),
    "a dead launcher of root": ("TORCHELASTIC_RUN_ID", ["systemd"], False),
    "a dead launcher, in a session": ("TORCHELASTIC_RUN_ID", ["systemd", OTHER_USER], False),
    "/proc without links": ("TORCHELASTIC_RUN_ID", [FileNotFoundError()], True),
    "a variable in a shell": ("ACCELERATE_USE_CPU", ["bash", OTHER_USER], True),
}


@pytest.mark.skipif(sys.platform != "linux", reason="processes have no such signal")
@pytest.mark.parametrize("name", PARENTS)
def test_a_worker_ends_if_its_launcher_has_died_before(name: str, monkeypatch) -> None:
    variable, programs, trains = PARENTS[name]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(psutil.Process, "parents", lambda self: programs)
    monkeypatch.setattr(launch_checks, "program_of", Mock(side_effect=programs))
    monkeypatch.setattr(launch_checks, "end_with_parent", lambda number: None)
    sent = Mock()
    monkeypatch.setattr(os, "kill", sent)
    end_with_launcher()
    assert [call(os.getpid(), LAUNCHER_DIED)] * (not trains) == sent.mock_calls


def test_launcher_is_derived_from_the_zero_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    for stage in ("1", "2", "3"):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
        assert current_launcher().name == f"zero{stage}"


@pytest.mark.parametrize("content", ['{"zero_optimization": {', '{"zero_optimization": {"stage": 4}}'])
def test_a_broken_deepspeed_json_is_named(content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(content, encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))
    with pytest.raises(UserError, match="zero.json"):
        check_launcher()


# The variables that accelerate sets for its config file and its options, and the setting in the message.
VARIABLES = {"GRADIENT_ACCUMULATION_STEPS=4": "gradient_accumulation_steps", "MIXED_PRECISION=fp16": "fp16"}
VARIABLES |= {"GRADIENT_CLIPPING=4": "gradient_clipping", "USE_CPU=true": "--use_cpu", "USE_FSDP=true": "--num_pro"}


@pytest.mark.parametrize(("variable", "told"), VARIABLES.items())
def test_unsupported_settings_of_the_launcher_are_refused(variable: str, told: str, monkeypatch) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(UserError, match=told):
        check_launcher()


FSDP = {"version": 1, "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": True}
FSDP |= {"reshard_after_forward": False, "offload_params": True, "activation_checkpointing": True}


@pytest.mark.parametrize(("key", "value"), [*FSDP.items(), ("auto_wrap_policy", "SIZE_BASED_WRAP")])
def test_unsupported_fsdp_settings_are_refused(key: str, value, monkeypatch, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text(encoding="utf-8"))
    config["fsdp_config"] |= {"fsdp_sync_module_states": True, f"fsdp_{key}": value}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = ("--config_file", str(tmp_path / "mine.yaml"), "train.py")
    variables = prepare_multi_gpu_env(_validate_launch_command(launch_command_parser().parse_args(words))[0])
    for name in variables.keys() - os.environ.keys():  # as accelerate launch does
        monkeypatch.setenv(name, variables[name])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert current_launcher().name == "fsdp2"
    with pytest.raises(UserError, match=f"fsdp_{key}"):
        check_launcher()


PLAN = plan_batches(tokens_per_step=4096, sequence_length=128, micro_batch_size=4, num_processes=2, max_steps=8)
BUILT = {"processes": 2, "matrix_products": "bfloat16", "master_weights": "float32", "zero_stage": 1, "clip": 1.0}
BUILT |= {"rows_per_pass": 4, "accumulation_steps": 4, "gradient_sums": "float32"}
WRONG = {"processes": 1, "matrix_products": "float32", "master_weights": "bfloat16", "clip": 0.0}
WRONG |= {"rows_per_pass": 8, "accumulation_steps": 1}


def test_engine_that_differs_from_the_recipe_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    environment = Environment(plan=PLAN, precision="bf16")
    check = functools.partial(check_engine, environment=environment, max_grad_norm=1.0)
    check(BUILT)
    for key, value in WRONG.items():
        with pytest.raises(UserError, match=key):
            check(BUILT | {key: value})
    assert not caplog.text
    check(BUILT | {"gradient_sums": "bfloat16"})
    assert "grad_accum_dtype" in caplog.text  # sums in bf16 cause a warning


def test_an_optimizer_that_sees_shapes_is_refused_under_deepspeed(tiny_recipe: Path, monkeypatch) -> None:
    # Adafactor factors matrices, and ZeRO gives it one flat vector.
    recipe = load_recipe([str(tiny_recipe), "--optim", "adafactor"])
    resolve_settings(recipe)
    monkeypatch.setattr(settings, "current_launcher", lambda: LAUNCHERS["zero1"])
    with pytest.raises(UserError, match="--optim"):
        resolve_settings(recipe)


def test_optimizers_that_the_trainer_would_use_wrongly_are_refused() -> None:
    """An average needs optimizer.eval(), others update in the backward pass or replace the groups of weight decay."""
    families = (
        trainer_optimizer._SCHEDULE_FREE_OPTIMIZERS,
        trainer_optimizer._GALORE_OPTIMIZERS,
        trainer_optimizer._APOLLO_OPTIMIZERS,
        [OptimizerNames.LOMO, OptimizerNames.ADALOMO],
    )
    expected = {name.value for family in families for name in family}
    refused = set()
    for name in OptimizerNames:
        try:
            check_optimizer(name.value)
        except UserError as error:
            assert f"--optim {name.value}" in str(error) and "\n" not in str(error)
            refused.add(name.value)
    assert refused == expected and len(expected) > 10


def test_a_refused_optimizer_writes_nothing(typed, tmp_path: Path) -> None:
    done = typed(tmp_path / "run", "--optim", "schedule_free_adamw")
    assert done.returncode == 2 and "--optim schedule_free_adamw" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()
