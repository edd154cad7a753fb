"""The files in accelerate_configs/ and ds_configs/ are valid and complete."""

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from gpt2_repro.launchers import LAUNCHERS
from tests.sections import RECIPES, ROOT, values_of


ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "ds_configs").glob("*.json"))
# The recipe or the DeepSpeed JSON sets these. accelerate refuses some of them together with a JSON.
FORBIDDEN = {"mixed_precision", "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "use_cpu"}


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_config_holds_launcher_facts_only(path: Path) -> None:
    load_config_from_file(str(path))
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    flat = config.keys() | config.get("deepspeed_config", {}).keys()
    assert not flat & FORBIDDEN and not any(key.startswith("offload") for key in flat)
    assert isinstance(config["num_processes"], int)
    # accelerate refuses unknown keys at the top level, but ignores them in deepspeed_config.
    assert config.get("deepspeed_config", {}).keys() <= {"deepspeed_config_file", "deepspeed_multinode_launcher"}
    named = Path(config.get("deepspeed_config", {}).get("deepspeed_config_file", ""))
    assert named.name == LAUNCHERS[path.stem].deepspeed_json and (not named.name or ROOT / named in DEEPSPEED)


def test_the_table_of_launchers_has_every_file() -> None:
    assert sorted(LAUNCHERS) == [path.stem for path in ACCELERATE]
    assert {launcher.deepspeed_json for launcher in LAUNCHERS.values()} - {""} == {path.name for path in DEEPSPEED}


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_deepspeed_json_takes_the_numbers_of_every_recipe(path: Path, tmp_path: Path) -> None:
    """The DeepSpeed configuration has each recipe's gradient clipping and bf16."""
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["data_types"]["grad_accum_dtype"] == "fp32"
    # BF16_Optimizer (ZeRO-1 with bf16, DeepSpeed 0.19.8) sums the gradients in buckets of a constant size.
    assert ("reduce_bucket_size" in written["zero_optimization"]) == (path.stem != "zero1")
    assert written["timers"]["throughput"]["enabled"] is False
    shared = TrainingArguments.__dataclass_fields__.keys() - {"lr_scheduler_type", "optim"}
    for recipe in RECIPES:
        values = values_of(recipe)["training"]
        values |= {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 10, "gradient_accumulation_steps": 2}
        values["dataloader_num_workers"] = 0  # None, until the device is known
        config = HfTrainerDeepSpeedConfig(str(path))
        config.trainer_config_process(
            TrainingArguments(**{name: value for name, value in values.items() if name in shared})
        )
        assert config.mismatches == []
        assert config.config["gradient_clipping"] == values["max_grad_norm"]
        assert config.config["bf16"]["enabled"] == values["bf16"]
