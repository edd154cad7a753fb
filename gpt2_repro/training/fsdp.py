"""What the launcher's file may say of FSDP, checked before anything is built."""

import os

from gpt2_repro.errors import UserError


# What the block fsdp_config has to say, by names without their `fsdp_`; "none" is what a launcher leaves out.
FSDP = {
    "version": ("2", "the first version of FSDP flattens weights"),
    "state_dict_type": ("FULL_STATE_DICT", "the other forms are loaded by pickle, or by as many processes only"),
    "cpu_ram_efficient_loading": ("false", "every process draws its weights from the seed"),
    "reshard_after_forward": ("true", "what reads weights between two steps wants the masters"),
    "offload_params": ("false", "weights stay on the devices"),
    "activation_checkpointing": ("false", "the recipe says so: type --activation_checkpointing after train.py"),
    "auto_wrap_policy": ("none", "each block is a unit of its own"),
}


def check_fsdp() -> None:
    """Raise UserError for one process, and for settings of FSDP that would do nothing or harm."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError(
            "FSDP needs several processes: pass --num_processes, or launch with accelerate_configs/single_gpu.yaml"
        )
    for name, (needed, why) in FSDP.items():
        value = os.environ.get(f"FSDP_{name.upper()}", "none")
        if value != needed:
            mend = "leave it out" if needed == "none" else f"write fsdp_{name}: {needed}"
            raise UserError(f"the launcher's file has fsdp_{name} {value}: {mend}, for {why}")
