"""What a launcher's files get wrong in silence is refused in one line."""

import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from gpt2_repro.compute import plan_batches
from gpt2_repro.errors import UserError
from gpt2_repro.training.engine import check_engine
from gpt2_repro.training.launcher import check_deepspeed_json, check_launcher, launcher_name


ROOT = Path(__file__).parents[2]
ZERO1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_our_own_pass(path: Path) -> None:
    check_deepspeed_json(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_cliping": 1.0}, "no key 'gradient_cliping' that does anything: did you mean 'gradient_clipping'"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "data_types has no key 'grad_acum_dtype'.*'grad_accum_dtype'"),
        ({"bf16": {"enable": "auto"}}, "bf16 has no key 'enable': did you mean 'enabled'"),
        ({"gradient_clipping": None}, 'gradient_clipping belongs to the recipe: write "gradient_clipping": "auto"'),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps belongs to the recipe"),
        ({"bf16": {"enabled": True}}, "bf16 belongs to the recipe"),
        ({"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}, "without fp32 masters"),
        ({"optimizer": {"type": "AdamW"}}, "the recipe chooses the optimizer"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "the recipe chooses the schedule"),
        ({"fp16": {"enabled": True}}, "loss scaling"),
        ({"checkpoint": {"load_universal": True}}, "train.py writes checkpoints, and converts them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_json_that_would_not_do_what_it_says_is_refused(change, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in (ZERO1 | change).items() if value is not None}))
    with pytest.raises(UserError, match=message):
        check_deepspeed_json(path)


def test_a_json_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run from the repository's root"):
        check_deepspeed_json(tmp_path / "zero1.json")
    (tmp_path / "zero1.json").write_text("{'a': 1}")
    with pytest.raises(UserError, match="is not JSON"):
        check_deepspeed_json(tmp_path / "zero1.json")


def test_sharded_weights_are_known_by_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_name() == "ddp"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for stage, name in ((1, "zero1"), (2, "zero1"), (3, "zero3")):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(ROOT / "ds_configs" / f"zero{stage}.json"))
        check_launcher()
        assert launcher_name() == name
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="run from the repository's root"):
        check_launcher()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert launcher_name() == "zero3"


def test_the_launchers_cpu_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(UserError, match="drops DeepSpeed.*type --use_cpu after train.py"):
        check_launcher()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    check_launcher()


@pytest.mark.parametrize("name", ["gradient_clipping", "gradient_accumulation_steps"])
def test_what_the_recipe_owns_is_refused_in_the_launchers_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_{name.upper()}", "4")
    with pytest.raises(UserError, match=f"the launcher's file has {name} 4, which belongs to the recipe"):
        check_launcher()


@pytest.fixture
def fsdp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The environment that accelerate makes of our own file, with changes to its block."""

    def run(**changes: object) -> None:
        config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
        config["fsdp_config"] |= changes
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
        typed = launch_command_parser().parse_args(["--config_file", str(tmp_path / "mine.yaml"), "train.py"])
        made = prepare_multi_gpu_env(_validate_launch_command(typed)[0])
        for name in made.keys() - os.environ.keys():
            monkeypatch.setenv(name, made[name])
        monkeypatch.setenv("WORLD_SIZE", "2")

    return run


def test_our_own_fsdp_passes_and_one_process_does_not(fsdp, monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp()
    check_launcher()
    assert launcher_name() == "fsdp2"
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="there is one: launch with --config_file accelerate_configs/single_gpu.yaml"):
        check_launcher()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fsdp_version": 1}, "has fsdp_version 1: write fsdp_version: 2"),
        ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "write fsdp_state_dict_type: FULL_STATE_DICT"),
        ({"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True}, "loading true: .*: false, for"),
        ({"fsdp_reshard_after_forward": False}, "reshard_after_forward false: write fsdp_reshard_after_forward: true"),
        ({"fsdp_offload_params": True}, "fsdp_offload_params true: write fsdp_offload_params: false"),
        ({"fsdp_activation_checkpointing": True}, "type --activation_checkpointing after train.py"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy SIZE_BASED_WRAP: leave it out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fsdp_settings_that_would_do_nothing_or_harm_are_refused(fsdp, change: dict, message: str) -> None:
    fsdp(**change)
    with pytest.raises(UserError, match=message):
        check_launcher()


PLAN = plan_batches(
    tokens_per_step=4096, sequence_length=128, micro_batch_size=4, num_processes=2, total_tokens=10_000_000
)
BUILT = {
    "processes": 2,
    "products": "bfloat16",
    "masters": "float32",
    "zero_stage": 1,
    "clip": 1.0,
    "rows_per_pass": 4,
    "accumulation_steps": 4,
    "accumulation": "float32",
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"processes": 1},
        {"products": "float32"},
        {"masters": "bfloat16"},
        {"clip": 0.0},
        {"rows_per_pass": 8},
        {"accumulation_steps": 1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_engine_that_is_not_the_recipes_is_refused(wrong: dict) -> None:
    check_engine(BUILT, PLAN, max_grad_norm=1.0, bf16=True)
    ((key, value),) = wrong.items()
    with pytest.raises(UserError, match=f"the engine has {key} {value} and the recipe asks for {BUILT[key]}"):
        check_engine(BUILT | wrong, PLAN, max_grad_norm=1.0, bf16=True)


def test_sums_in_bf16_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    check_engine(BUILT | {"accumulation": "bfloat16"}, PLAN, max_grad_norm=1.0, bf16=True)
    assert "gradients of 4 passes are summed in bf16" in caplog.text and "grad_accum_dtype" in caplog.text


def test_a_wrong_launcher_file_ends_the_command_in_one_line(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO1 | {"gradient_cliping": 1.0}))
    config = yaml.safe_load((ROOT / "accelerate_configs" / "zero1.yaml").read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "ds.json")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    for options, message in [
        (("--config_file", tmp_path / "mine.yaml", "--num_processes", 1), "did you mean 'gradient_clipping'?"),
        (("--config_file", "accelerate_configs/zero1.yaml", "--cpu"), "drops DeepSpeed and runs one process"),
    ]:
        run = tmp_path / "run"
        launch = ("-m", "accelerate.commands.launch", *options, "--main_process_port", 0)
        done = type_warm("python", *launch, "train.py", tiny_recipe, "--output_dir", run)
        assert done.returncode != 0
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert message in line and not run.exists()
