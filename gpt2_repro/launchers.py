"""List the files in accelerate_configs/ and the features that each file supports."""

import json
import os
import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.errors import UserError, did_you_mean


PACKAGE = Path(__file__).parent
INSTALLED = (PACKAGE / "recipes").is_dir()  # from a wheel, and not in the repository
ROOT = PACKAGE if INSTALLED else PACKAGE.parent  # has recipes/, accelerate_configs/ and ds_configs/
# The commands that messages name, for the current folder.
SCRIPTS = "" if Path().samefile(ROOT) else f"{ROOT}/"
PREPARE = shlex.join(["python", f"{SCRIPTS}prepare_data.py"])
EVALUATE = shlex.join(["bash", f"{SCRIPTS}evaluate.sh"])
TRAINING = [str(ROOT / "train.py")]  # what python and accelerate launch start
if INSTALLED:
    PREPARE = "gpt2-repro prepare"
    EVALUATE = "gpt2-repro evaluate"
    TRAINING = ["-m", "gpt2_repro.train"]
# Set by accelerate, torchrun and clusters. torchrun also reads its options from PET_*.
VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET|ACCELERATE|FSDP)_\w+"
)


class Launcher(NamedTuple):
    """A launcher: a file in accelerate_configs/ and the features that it supports."""

    name: str  # of the file, without .yaml
    # Name without extension of a file that identifies the format of a checkpoint, or "" without an engine. A run can
    # resume with every launcher that has the same format.
    form: str = ""
    deepspeed_json: str = ""  # the file in ds_configs/, if DeepSpeed is used
    # Whether each process has all weights. Compiling the loss and Muon need them.
    whole_weights: bool = True

    @property
    def config(self) -> str:
        """Path of the config for `accelerate launch --config_file`."""
        return f"accelerate_configs/{self.name}.yaml"

    def command(self, *options: str) -> list[str]:
        """Return the part of the command line that comes before the training script. It works in any folder."""
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / self.config)]
        if self.deepspeed_json:
            command += ["--deepspeed_config_file", str(ROOT / "ds_configs" / self.deepspeed_json)]
        return [*command, *options]


_ZERO = "mp_rank_00_model_states"  # one model file for all ranks
RECOMMENDED = Launcher("zero1", form=_ZERO, deepspeed_json="zero1.json")
DDP = Launcher("ddp")
ZERO2 = Launcher("zero2", form=_ZERO, deepspeed_json="zero2.json")
ZERO3 = Launcher(
    "zero3", form="zero_pp_rank_0_mp_rank_00_model_states", deepspeed_json="zero3.json", whole_weights=False
)
FSDP2 = Launcher("fsdp2", form="pytorch_model_fsdp", whole_weights=False)
ZERO1_MULTINODE = Launcher("zero1_multinode", form=_ZERO, deepspeed_json="zero1.json")
LAUNCHERS = {launcher.name: launcher for launcher in (RECOMMENDED, DDP, ZERO2, ZERO3, FSDP2, ZERO1_MULTINODE)}


def training_command(*options: str, on_gpu: bool, launcher: Launcher = RECOMMENDED) -> list[str]:
    """Return the words of a training command that messages name, up to the recipe.

    `launcher` and `options` of accelerate launch are used if `on_gpu`.
    """
    if INSTALLED and on_gpu:
        return ["gpt2-repro", "train", "--config_file", f"{launcher.name}.yaml", *options]
    if INSTALLED:
        return ["gpt2-repro", "train"]
    root = Path(os.path.relpath(ROOT))
    script = str(root / "train.py")
    if not on_gpu:
        return ["python", script]
    return ["accelerate", "launch", "--config_file", str(root / launcher.config), *options, script]


def launch_command(config: str) -> list[str]:
    """Return the command of accelerate launch with a config file: a path, or the name of a file in accelerate_configs/.

    Raises UserError if there is no such file.
    """
    if Path(config).is_file():
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    for launcher in LAUNCHERS.values():
        if config in (launcher.config, f"{launcher.name}.yaml"):
            return launcher.command()
    names = [f"{name}.yaml" for name in LAUNCHERS]
    raise UserError(f"There is no config file {config}. {did_you_mean(config, names)}")


def check_variables() -> None:
    """Raise UserError if a launcher's variables are set but no launcher is running."""
    # torchrun and accelerate set TORCHELASTIC_RUN_ID. Without them, a process would wait for the others forever.
    launcher_runs = "MASTER_ADDR" in os.environ
    waits_for_others = "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    stale: list[str] = []
    if waits_for_others or not launcher_runs:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
            if name in os.environ:
                stale.append(name)
    # For these engines, accelerate starts even a single process with torchrun.
    if "LOCAL_RANK" not in os.environ:
        for name, value in os.environ.items():
            is_engine = re.fullmatch(r"ACCELERATE_USE_(?!CPU$)\w+", name)
            if is_engine and value.lower() not in ("", "0", "false", "no"):
                stale.append(name)
    if stale:
        set_here = ", ".join(f"{name}={os.environ[name]}" for name in stale)
        fix = f"Run `unset {' '.join(stale)}`, or start the command with accelerate launch."
        raise UserError(f"The environment has {set_here}, but no launcher started this process. {fix}")


def forget_variables() -> None:
    """Remove the variables of launchers from the environment.

    A cluster may set them for all processes. A command that is started without a launcher must not join others.
    """
    for name in list(os.environ):
        if VARIABLES.fullmatch(name):
            del os.environ[name]


def current_launcher() -> Launcher:
    """Return the launcher of this process: ddp if neither FSDP2 nor DeepSpeed is used."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return FSDP2
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return DDP
    path = deepspeed_json()
    if path is None:
        stage = int(os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"])
    else:
        config = json.loads(path.read_text(encoding="utf-8"))
        stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == 2:
        return ZERO2
    if stage == 3:
        return ZERO3
    return RECOMMENDED


def deepspeed_json() -> Path | None:
    """Return the path of the DeepSpeed JSON of this process, or None without one."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return None
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return None
    return Path(path)


def launcher_of_checkpoint(files: Collection[str]) -> Launcher:
    """Return the first launcher that can resume a checkpoint with these files, or ddp."""
    stems = {Path(file).stem for file in files}
    for launcher in LAUNCHERS.values():
        if launcher.form in stems:
            return launcher
    return DDP
