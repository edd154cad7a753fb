"""Print the commands of a run on a machine or on several machines."""

import shlex
from pathlib import Path

from gpt2_repro import cli
from gpt2_repro.hardware import Accelerator
from gpt2_repro.launchers import EVALUATE, PREPARE, ZERO1_MULTINODE, training_command
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.planning import cost
from gpt2_repro.recipe import TrainingRecipe, output_dir_of


MACHINE_0 = "MACHINE_0"  # stands for an address in the printed commands


def machines_of(device: Accelerator) -> int:
    """Return the number of machines that have these GPUs."""
    if device.kind != "cuda":
        return 1
    return cost.machines_of(device.count)


def is_launched(recipe: TrainingRecipe, device: Accelerator) -> bool:
    """Return whether accelerate starts the run. On one GPU without bf16, `python train.py` does (docs/machines.md)."""
    if device.count > 1:
        return True
    return device.kind == "cuda" and recipe.training.precision != "fp16"


def command_lines(recipe: TrainingRecipe, device: Accelerator) -> list[str]:
    """Return the commands that prepare, train and evaluate, with the options that were passed."""
    lines = [_heading(device)]
    options = recipe.overrides()
    if not Path(recipe.data.dataset_dir, MANIFEST).is_file():
        data_options = {name: value for name, value in options.items() if hasattr(recipe.data, name)}
        prepare = [str(recipe.path)]
        prepare += cli.words_of(data_options)
        if recipe.data.source == "files" and not recipe.data.data_files:
            prepare += ["--data_files", "FILE"]
        lines.append(f"  {PREPARE} {shlex.join(prepare)}")
    for train in _training_commands(recipe, device):
        train.append(str(recipe.path))
        train += cli.words_of(options)
        lines.append(f"  {shlex.join(train)}")
    run = shlex.quote(output_dir_of(recipe))
    lines.append(f"  {EVALUATE} {run}")
    return lines


def _heading(device: Accelerator) -> str:
    """Return the line before the printed commands."""
    machines = machines_of(device)
    if machines == 1:
        return "Commands:"
    return f"Commands (training: one on each of {machines} machines; {MACHINE_0} is the address of the first one):"


def _training_commands(recipe: TrainingRecipe, device: Accelerator) -> list[list[str]]:
    """Return the training command of each machine up to the recipe."""
    machines = machines_of(device)
    processes = ["--num_processes", str(device.count)]
    if machines == 1:
        return [training_command(*processes, on_gpu=is_launched(recipe, device))]
    commands: list[list[str]] = []
    for rank in range(machines):
        place = ["--machine_rank", str(rank), "--main_process_ip", MACHINE_0]
        words = ["--num_machines", str(machines), *processes, *place]
        commands.append(training_command(*words, on_gpu=True, launcher=ZERO1_MULTINODE))
    return commands
