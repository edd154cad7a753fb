"""What stands in the way of a recipe on this machine: `python -m gpt2_repro.preflight` looks, a line a thing."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpt2_repro import hardware
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import recommended_launcher
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.build import choose_attention
from gpt2_repro.preflight import links, memory
from gpt2_repro.preflight.cost import card_of
from gpt2_repro.preflight.environment import Finding
from gpt2_repro.preflight.links import check_all_reduce
from gpt2_repro.training.arguments import MUON, TrainingRecipe
from gpt2_repro.training.workload import plan_run


REPOSITORY = Path(__file__).parents[1]
DIST_SECONDS = 30.0
PROBE_SECONDS = 600.0


def check_devices(recipe: TrainingRecipe) -> list[Finding]:
    """Check driver, GPUs, precision, compiler and attention by the rules of train.py."""
    model, training = recipe.model, recipe.training
    version = hardware.nvidia_driver()
    driver = Finding("✓" if version else "!", "driver", version or "no NVIDIA device")
    rules = {"use_cpu": training.use_cpu, "accept_any_hardware": training.accept_any_hardware}
    try:
        rules["use_cpu"] = on_cpu = hardware.choose_device(**rules)
    except UserError as error:
        return [driver, Finding("✗", "device", str(error))]

    device = {"cuda": not on_cpu, "bf16": training.bf16, "document_mask": model.document_mask}
    here = hardware.find_accelerator(use_cpu=on_cpu)
    gpus = f"{here.count} x {here.name}, {(here.memory_bytes or 0) / 1e9:.0f} GB each"
    found = _judge("attention", lambda: ": ".join(choose_attention(model.attn_implementation, **device)))
    slower = found.mark == "✓" and not on_cpu and not found.words.startswith("flash_attention_2")
    return [
        driver,
        Finding("✓", "device", f"the CPU, {os.cpu_count()} cores" if on_cpu else gpus),
        _judge("precision", lambda: hardware.choose_bf16(training.bf16, **rules)[1]),
        _judge("torch.compile", lambda: "on" if hardware.choose_compile(training.torch_compile, **rules) else "off"),
        found._replace(mark="!") if slower else found,
    ]


def _judge(about: str, rule: Callable[[], str]) -> Finding:
    """The result of a rule of train.py here, or why it refuses."""
    try:
        return Finding("✓", about, rule())
    except UserError as error:
        return Finding("✗", about, str(error))


def check_division(recipe: TrainingRecipe, cards: int) -> Finding:
    """Whether the tokens of a step divide on so many cards."""

    def divides() -> str:
        plan = plan_run(recipe.training, recipe.data, num_processes=cards)
        return f"{plan.micro_batch_size} rows x {cards} x {plan.gradient_accumulation_steps} accumulation steps"

    return _judge("step", divides)


def check_links(file: str | None) -> list[Finding]:
    """How the GPUs hang together, from a saved output of `nvidia-smi topo -m` or the machine's own."""
    if file:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--topology {file} cannot be read as text ({error})") from None
    elif command := shutil.which("nvidia-smi"):
        try:
            asked = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            return [Finding("✗", "links", "nvidia-smi does not answer: restart the machine, or rent another one")]
        text = asked.stdout
    else:
        return []
    try:
        sound, sentence = links.advice(links.parse_topology(text))
    except UserError as error:
        if file:
            raise
        sound, sentence = False, f"nvidia-smi does not say how the cards hang together ({error})"
    return [Finding("✓" if sound else "!", "links", sentence)]


def check_sum(cards: int | None) -> Finding:
    """A sum over all cards; over two processes of a CPU where none are named."""
    import torch

    here = torch.cuda.device_count()
    if here and cards and cards > here:
        return Finding("✗", f"sum over {cards} processes", f"{here} GPUs are here: type --n {here}")
    return check_all_reduce(cards or here or 2, seconds=DIST_SECONDS)


def find_micro_batch(recipe: TrainingRecipe, name: str, cards: int) -> Finding:
    """The largest micro-batch that fits, with the recipe's own command on the prepared data."""
    data, training = recipe.data, recipe.training
    if not Path(data.dataset_dir, MANIFEST).is_file():
        return Finding("!", "memory", f"it is probed with the data, and {data.dataset_dir} is not prepared yet")
    card, length = card_of(name), data.sequence_length
    most = training.per_device_train_batch_size
    rows = training.tokens_per_step // length // cards
    say = functools.partial(print, file=sys.stderr, flush=True)
    say("looking for the micro-batch: a fresh process an attempt, 2 to 3 minutes each with compiling (assumed)")
    launcher = recommended_launcher(muon=training.optim == MUON).command(cards, use_cpu=training.use_cpu)
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        run, path = Path(scratch, "run"), Path(scratch, "probe.yaml")
        path.write_text(recipe.to_yaml())
        silent = {"eval_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": "true"}
        # Two steps, the second with the optimizer's states there.
        short = {"max_steps": 2, "warmup_steps": 1, "resume_from": "", "extend_to": 0, "stop_at_step": 0}
        # As here: of a folder that is typed only the form has to fit.
        options = {"dataset_dir": data.dataset_dir, "output_dir": run, **silent, **short}

        def attempt(trial: memory.MemoryTrial) -> memory.Outcome:
            # Of two passes each.
            words = options | {"tokens_per_step": 2 * trial.micro_batch * length * cards}
            typed = [word for name, value in words.items() for word in (f"--{name}", str(value))]
            command = [*launcher, str(REPOSITORY / "train.py"), str(path), *typed]
            shutil.rmtree(run, ignore_errors=True)
            outcome = memory.attempt_command(command, trial, seconds=PROBE_SECONDS)
            say(f"  {' '.join(trial.options)}: {outcome.result}")
            return outcome

        outcomes = memory.find_largest(min(most, card.micro_batch if card else most), most, rows, attempt)
    if outcomes[-1].result == "failed":
        return Finding("✗", "memory", f"{' '.join(outcomes[-1].trial.options)} failed: {outcomes[-1].said}")
    if found := memory.best(outcomes):
        return Finding("✓", "memory", f"fits: {' '.join(found.options)}")
    return Finding("✗", "memory", "not even one row a pass fits: a smaller --sequence_length, or a larger card")


def check_data(recipe: TrainingRecipe) -> Finding:
    """Whether the prepared folder fits the recipe; one that is not there yet is no obstacle."""
    folder = recipe.data.dataset_dir
    if not Path(folder, MANIFEST).is_file():
        return Finding("!", "data", f"{folder} is not prepared yet")

    opened = functools.partial(PreparedData.open, recipe.data, typed=recipe.typed, recipe=recipe.path)
    return _judge("data", lambda: f"{opened().path} fits the recipe")
