"""List the launchers: the files in accelerate_configs/ and what each one supports.

To add a launcher, add an entry to LAUNCHERS.
"""

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parents[1]


class CheckpointForm(NamedTuple):
    """A checkpoint format: a description and a file name.

    A file with this name exists only in checkpoints of this format. The name is given without extension. It is "" for
    checkpoints without DeepSpeed or FSDP2.
    """

    words: str
    file: str


PLAIN = CheckpointForm("without DeepSpeed", "")
ZERO = CheckpointForm("with DeepSpeed", "mp_rank_00_model_states")  # one model file for all ranks
ZERO3 = CheckpointForm("with ZeRO-3", "zero_pp_rank_0_mp_rank_00_model_states")
FSDP2 = CheckpointForm("with FSDP2", "pytorch_model_fsdp")


class Launcher(NamedTuple):
    """A launcher: a file in accelerate_configs/ and the features it supports.

    Args:
        name: the name of the file without .yaml.
        form: the format of the checkpoints. A run can be resumed with every launcher that has the same format.
        deepspeed_json: the name of the DeepSpeed config in ds_configs/, or "" without DeepSpeed.
        torch_compile: whether the loss can be compiled. Sharded weights prevent this, because they are gathered and
            freed inside the loss.
        muon: whether the optimizer gets complete weight matrices, which Muon needs.
        torchrun_on_cpu: whether torchrun starts the CPU processes, because accelerate launch would need mpirun.
    """

    name: str
    form: CheckpointForm
    deepspeed_json: str = ""
    torch_compile: bool = True
    muon: bool = False
    torchrun_on_cpu: bool = False

    @property
    def config(self) -> str:
        """The path to pass to `accelerate launch` as --config_file."""
        return f"accelerate_configs/{self.name}.yaml"

    def command(self, num_processes: int, *, use_cpu: bool = False) -> list[str]:
        """Return the launcher's command line up to, but without, the training script."""
        if use_cpu and self.torchrun_on_cpu:
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        config = ["--config_file", str(ROOT / self.config), "--num_processes", str(num_processes)]
        return [sys.executable, "-m", "accelerate.commands.launch", *config]


# The recommended launchers come first.
LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("zero1", ZERO, "zero1.json"),
        Launcher("ddp", PLAIN, muon=True, torchrun_on_cpu=True),
        Launcher("zero2", ZERO, "zero2.json"),
        Launcher("zero3", ZERO3, "zero3.json", torch_compile=False),
        Launcher("fsdp2", FSDP2, torch_compile=False),
        Launcher("single_gpu", PLAIN, muon=True),
        Launcher("zero1_multinode", ZERO, "zero1.json"),
    )
}


def recommended_launcher(*, muon: bool = False) -> Launcher:
    """Return the first launcher, or with `muon` the first launcher that supports Muon."""
    return next(launcher for launcher in LAUNCHERS.values() if launcher.muon or not muon)


def current_launcher() -> Launcher:
    """Return the launcher that this process was started with.

    accelerate sets environment variables for FSDP2 and DeepSpeed. Without these variables, the launcher is ddp.
    """
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return LAUNCHERS["fsdp2"]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return LAUNCHERS["ddp"]
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        stage = int(os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"])
    else:
        stage = json.loads(Path(path).read_text()).get("zero_optimization", {}).get("stage", 0)
    return LAUNCHERS[f"zero{stage}" if stage in (2, 3) else "zero1"]


def launcher_of_checkpoint(files: Collection[str]) -> Launcher:
    """Return the first launcher that can resume a checkpoint with these files."""
    stems = {Path(file).stem for file in files}
    return next((each for each in LAUNCHERS.values() if each.form.file in stems), LAUNCHERS["ddp"])
