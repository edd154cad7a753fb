"""Mistakes in launcher files are refused, even if libraries silently ignore them."""

import functools
import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from gpt2_repro.batch_plan import plan_batches
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import LAUNCHERS, current_launcher
from gpt2_repro.planning.recipe import load_recipe
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.training import settings
from gpt2_repro.training.engine import check_engine
from gpt2_repro.training.launch_checks import check_deepspeed_json, check_launcher
from gpt2_repro.training.settings import resolve_settings


ROOT = Path(__file__).parents[2]
ZERO1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text(encoding="utf-8"))
MASTERS = "bf16_master_weights_and_grads"


CHANGES: dict = {"gradient_clipping": None, "gradient_accumulation_steps": 4, "communication_data_type": "fp16"}
CHANGES |= {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}, "fp16": {"enabled": True}}
CHANGES |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}, "checkpoint": {"tag": 1}}
TOLD = {"data_types": "grad_accum_dtype"}
OF_ZERO = {"compute_grad_norm": False, "round_robin_gradients": True, "parameter_alignment": True}


@pytest.mark.parametrize(("key", "value"), [*CHANGES.items(), ("bf16", {"enabled": "auto", MASTERS: True})], ids=str)
def test_deepspeed_json_with_ignored_settings_is_refused(key: str, value, tmp_path: Path) -> None:
    config = {name: its for name, its in (ZERO1 | {key: value}).items() if its is not None}
    (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=TOLD.get(key, key)):
        check_deepspeed_json(tmp_path / "mine.json")


@pytest.mark.parametrize("key", OF_ZERO)
def test_zero_settings_that_change_the_masters_are_refused(key: str, tmp_path: Path) -> None:
    for value in (OF_ZERO[key], not OF_ZERO[key]):
        config = ZERO1 | {"zero_optimization": {"stage": 1, key: value}}
        (tmp_path / "mine.json").write_text(json.dumps(config), encoding="utf-8")
        if value == OF_ZERO[key] or key == "compute_grad_norm":
            with pytest.raises(UserError, match=key):
                check_deepspeed_json(tmp_path / "mine.json")
        else:
            check_deepspeed_json(tmp_path / "mine.json")


BROKEN = {
    "empty": "",
    "cut": '{"zero_optimization": {',
    "list": "[1]",
    "text": '"x"',
    "bytes": b"\xff",
    "missing": None,
}
BROKEN |= {f"zero {value}": f'{{"zero_optimization": {value}}}' for value in ("1", "[]", "null", '{"stage": "one"}')}
BROKEN |= {
    f"stage {value}": f'{{"zero_optimization": {{"stage": {value}}}}}' for value in ("4", "null", "true", "[1]")
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_deepspeed_json_ends_in_one_line(name: str, tiny_recipe: Path, tmp_path: Path, type_warm) -> None:
    path, content = tmp_path / "my zero.json", BROKEN[name]
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    launched |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", tmp_path / "run", **launched)
    assert done.returncode == 2 and str(path) in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_launcher_is_derived_from_the_zero_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    for stage in (1, 2, 3):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
        assert current_launcher().name == f"zero{stage}"


# The variables that accelerate sets for its config file and its options.
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ACCELERATE_GRADIENT_CLIPPING", "4", "gradient_clipping"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "fp16"),
        ("ACCELERATE_USE_CPU", "true", "--use_cpu"),
        ("ACCELERATE_USE_FSDP", "true", "--num_processes"),
    ],
)
def test_unsupported_settings_of_the_launcher_are_refused(name: str, value: str, told: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
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
