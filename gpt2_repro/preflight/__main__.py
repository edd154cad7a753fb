"""Check a machine before a run, and estimate the hours and dollars of the run.

    python -m gpt2_repro.preflight                                           check this machine for the default recipe
    python -m gpt2_repro.preflight recipes/gpt2_124m.yaml --dist --memory    also test the GPU links and the memory
    python -m gpt2_repro.preflight --gpu "A100 SXM" --n 8 --usd_per_hour 14  plan for a machine you have not rented yet

Each check prints one line: ✓ good, ! a note, ✗ the run would fail. The exit code is 1 if any line has a ✗.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.cli import positive_count, positive_number
from gpt2_repro.cli import run as run_command
from gpt2_repro.errors import UserError
from gpt2_repro.files import to_json
from gpt2_repro.launchers import forget_variables
from gpt2_repro.preflight import environment
from gpt2_repro.preflight.environment import Finding


if TYPE_CHECKING:
    from gpt2_repro.training.arguments import TrainingRecipe


OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {
        "metavar": "H100",
        "help": "GPU to estimate the run for, by words of its name. (default: this machine's GPUs)",
    },
    "n": {"type": positive_count, "metavar": "N", "help": "Number of GPUs. (default: all GPUs of this machine)"},
    "tokens_per_second": {
        "type": positive_number,
        "help": "Measured speed of all GPUs together, in tokens per second. (default: estimated from published speeds)",
    },
    "dist": {
        "action": "store_true",
        "help": "Measure the speed of all-reduces over all GPUs, and check their sums. The check fails if the "
        "all-reduces take longer than 30 s.",
    },
    "memory": {"action": "store_true", "help": "Find the largest micro-batch that fits. Each attempt takes minutes."},
    "topology": {"metavar": "FILE", "help": "Read the output of `nvidia-smi topo -m` from this file."},
    "volume_gb": {"type": positive_number, "help": "Rented size of the network volume with the data, in GB."},
    "json": {"action": "store_true", "help": "Print the results as one JSON object."},
}


# The options and recipe fields that --help lists, by group.
HELP = {
    "Machine": ("gpu", "n", "tokens_per_second", "usd_per_hour", "volume_gb"),
    "Checks": ("dist", "memory", "topology", "json"),
    "Recipe": ("dataset_dir", "output_dir", "per_device_train_batch_size", "activation_checkpointing", "use_cpu"),
}


def main(argv: list[str]) -> None:
    """Print the results of all checks, and the estimated time and cost of the run."""
    forget_variables()
    packages = environment.check_python(Path(__file__).parents[2] / "requirements.txt")
    if any(finding.words.startswith("is not installed") for finding in packages):
        _print(packages)
        sys.exit(1)

    from gpt2_repro.hardware import find_accelerator
    from gpt2_repro.preflight.cost import card_of, plan_lines
    from gpt2_repro.training.arguments import load_recipe
    from gpt2_repro.training.sizing import follow_data

    prog = "python -m gpt2_repro.preflight"
    recipe = load_recipe(argv, description=__doc__, prog=prog, options=OPTIONS, groups=HELP)
    options = recipe.options
    machine_only = [word for word in ("dist", "memory", "topology", "volume_gb") if getattr(options, word)]
    if counted := re.fullmatch(r"(\d{1,3}) ?x ?(.+)", options.gpu or "", re.IGNORECASE):
        raise UserError(
            f"--gpu {options.gpu} contains the number of GPUs. Pass --gpu {shlex.quote(counted[2])} --n {counted[1]}."
        )
    if options.gpu is not None and machine_only:
        raise UserError(f"--{machine_only[0]} checks this machine; --gpu plans for another machine. Pass only one.")
    named = [] if options.gpu is None else _check_name(options.gpu, typed_speed=bool(options.tokens_per_second))
    if options.gpu is None:
        here = find_accelerator(use_cpu=recipe.training.use_cpu)
        cards = options.n or (here.count if here.kind == "cuda" else 1)
        recipe = follow_data(recipe, processes=cards)
    else:
        card, cards = card_of(options.gpu), options.n or 1
        recipe = follow_data(recipe, on_gpu=True, processes=cards, memory_bytes=1e9 * card.memory_gb if card else None)
    findings, planned = _look(recipe, packages, cards)
    findings += named
    if options.json:
        print(to_json({"findings": [finding._asdict() for finding in findings], **planned}, indent=2, default=str))
    else:
        _print(findings)
        print("\n".join(plan_lines(planned)))
    sys.exit(any(finding.mark == "✗" for finding in findings))


def _look(recipe: "TrainingRecipe", packages: list[Finding], cards: int) -> tuple[list[Finding], dict[str, Any]]:
    """Make all checks. Return their results, and the time and cost of the run.

    With --gpu, only the checks that do not need the rented machine are made.

    Args:
        packages: the result of `environment.check_python`.
        cards: number of GPUs, or 1 for the CPU.
    """
    from gpt2_repro import hardware, machine
    from gpt2_repro.preflight.cost import plan_on
    from gpt2_repro.training.sizing import workload_of

    options, training = recipe.options, recipe.training
    here = hardware.find_accelerator(use_cpu=training.use_cpu)
    name = here.name if options.gpu is None else options.gpu
    work = workload_of(recipe)
    on_cpu = options.gpu is None and here.kind == "cpu"
    measured = on_cpu and options.tokens_per_second is None
    speed = machine.measure_cpu(recipe, work) if measured else options.tokens_per_second
    price = {"usd_per_hour": training.usd_per_hour}
    planned = plan_on(work, name, cards, **price, tokens_per_second=speed, measured=measured)
    step = [machine.check_division(recipe, cards)]
    memory_bytes = 1e9 * (planned["machine"]["memory_gb"] or 0) if options.gpu is not None else here.memory_bytes
    if memory_bytes and not options.memory:
        step.append(machine.check_memory(recipe, work, memory_bytes, cards))
    if options.gpu is not None:
        return step, planned
    needs = [
        environment.Need("data", Path(recipe.data.dataset_dir), work.missing_bytes),
        environment.Need("the run", Path(training.output_dir or "runs"), work.run_bytes),
    ]
    findings = [
        *packages,
        *machine.check_devices(recipe),
        *step,
        *environment.check_limits(),
        machine.check_data(recipe),
        *environment.check_room(needs, volume_bytes=int(options.volume_gb * 1e9) if options.volume_gb else None),
        *machine.check_links(options.topology),
    ]
    if options.dist:
        findings.append(machine.check_sum(options.n))
    if measured and speed:
        findings.append(machine.check_time(planned["minutes"], speed))
    if options.memory:
        findings.append(machine.find_micro_batch(recipe, work, here.memory_bytes, cards))
    return findings, planned


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.mark} {finding.about:<16} {finding.words}")


def _check_name(name: str, *, typed_speed: bool) -> list[Finding]:
    """Return a note if the GPU name `name` matches several cards, or else [].

    Raises UserError if no card matches, unless the user passed --tokens_per_second (`typed_speed`).
    """
    from gpt2_repro.preflight.cost import card_table, cards_named

    meant = [card.card for card in cards_named(name)]
    if not meant and not typed_speed:
        known = ", ".join(card.card for card in card_table())
        raise UserError(
            f"The speed of the GPU {name!r} is not known. Pass --gpu with one of {known}. For any other GPU, also pass "
            "its measured --tokens_per_second."
        )
    return (
        [Finding("!", "card", f"{name} matches {' and '.join(meant)}. The estimate is for the first")]
        if meant[1:]
        else []
    )


if __name__ == "__main__":
    run_command(main)
