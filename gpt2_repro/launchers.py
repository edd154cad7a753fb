"""List the files in accelerate_configs/ and the features that each file supports."""

import json
import os
import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.errors import UserError
from gpt2_repro.files import read_table


ROOT = Path(__file__).parents[1]  # has recipes/, accelerate_configs/ and ds_configs/
# The commands that messages name, for the current folder.
SCRIPTS = "" if Path().samefile(ROOT) else f"{ROOT}/"
PREPARE, EVALUATE = shlex.join(["python", f"{SCRIPTS}prepare_data.py"]), shlex.join(["bash", f"{SCRIPTS}evaluate.sh"])
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


_TABLE = [Launcher(**row) for row in read_table(__file__, "launchers.yaml")]
LAUNCHERS, RECOMMENDED = {launcher.name: launcher for launcher in _TABLE}, _TABLE[0]


def training_command(*options: str, on_gpu: bool) -> list[str]:
    """Return the words of a training command that messages name, up to the recipe.

    `options` of accelerate launch are used if `on_gpu`.
    """
    root = Path(os.path.relpath(ROOT))
    launch = ["accelerate", "launch", "--config_file", str(root / RECOMMENDED.config), *options]
    return [*(launch if on_gpu else ["python"]), str(root / "train.py")]


def check_variables() -> None:
    """Raise UserError if a launcher's variables are set but no launcher is running."""
    # torchrun and accelerate set TORCHELASTIC_RUN_ID. Without them, a process would wait for the others forever.
    alone = "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if "MASTER_ADDR" not in os.environ or alone else ()
    stale = [name for name in names if name in os.environ]
    # For these engines, accelerate starts even a single process with torchrun.
    if "LOCAL_RANK" not in os.environ:
        engines = [name for name in os.environ if re.fullmatch(r"ACCELERATE_USE_(?!CPU$)\w+", name)]
        stale += [name for name in engines if os.environ[name].lower() not in ("", "0", "false", "no")]
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
        return LAUNCHERS["fsdp2"]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return LAUNCHERS["ddp"]
    if path := deepspeed_json():
        stage = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {}).get("stage", 0)
    else:
        stage = int(os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"])
    return LAUNCHERS[f"zero{stage}" if stage in (2, 3) else "zero1"]


def deepspeed_json() -> Path | None:
    """Return the path of the DeepSpeed JSON of this process, or None without one."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return Path(path) if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and path != "none" else None


def launcher_of_checkpoint(files: Collection[str]) -> Launcher:
    """Return the first launcher that can resume a checkpoint with these files, or ddp."""
    stems = {Path(file).stem for file in files}
    return next((each for each in LAUNCHERS.values() if each.form in stems), LAUNCHERS["ddp"])
