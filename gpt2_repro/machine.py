"""Check whether this machine can train a recipe."""

import dataclasses
import functools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpt2_repro import hardware
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import recommended_launcher
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.attention import Machine, choose_attention
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.scale import scale_of
from gpt2_repro.preflight import links, memory
from gpt2_repro.preflight.cost import Workload
from gpt2_repro.preflight.environment import Finding
from gpt2_repro.preflight.links import check_all_reduce
from gpt2_repro.text import duration, size
from gpt2_repro.training.arguments import TrainingRecipe
from gpt2_repro.training.sizing import estimate_memory, plan_run


REPOSITORY = Path(__file__).parents[1]
DIST_SECONDS = 30.0
PROBE_SECONDS = 600.0
# For measuring a CPU: seconds of all passes, FLOPs of one pass, and parameters of all transformer blocks.
CPU_SECONDS, CPU_PASS_FLOPS, CPU_BLOCKS = 2.0, 5e10, 20e6
MANY_MINUTES = 2 * 24 * 60.0


def check_devices(recipe: TrainingRecipe) -> list[Finding]:
    """Check the driver and GPUs, and whether they support the recipe's options.

    The options are the precision, torch.compile and the attention implementation. A finding is a line of the
    preflight output.
    """
    model, training = recipe.model, recipe.training
    version = hardware.nvidia_driver()
    driver = Finding("✓" if version else "!", "driver", version or "no NVIDIA device")
    rules = {"use_cpu": training.use_cpu, "accept_any_hardware": training.accept_any_hardware}
    try:
        rules["use_cpu"] = on_cpu = hardware.choose_device(**rules)
    except UserError as error:
        return [driver, Finding("✗", "device", str(error))]

    data = recipe.data
    machine = Machine(not on_cpu, training.bf16, data.sequence_length, document_mask=model.document_mask)
    config = build_config(model, sequence_length=data.sequence_length, vocab_size=128)
    rows = training.per_device_train_batch_size
    here = hardware.find_accelerator(use_cpu=on_cpu)
    gpus = f"{here.count} x {here.name}, {(here.memory_bytes or 0) / 1e9:.0f} GB each"
    found = _judge("attention", lambda: str(choose_attention(model.attn_implementation, machine, config, rows=rows)))
    return [
        driver,
        Finding("✓", "device", f"the CPU, {hardware.cpu_cores()} cores" if on_cpu else gpus),
        _judge("precision", lambda: hardware.choose_bf16(training.bf16, **rules)[1]),
        _judge("torch.compile", lambda: "on" if hardware.choose_compile(training.torch_compile, **rules) else "off"),
        found,
    ]


def _judge(about: str, rule: Callable[[], str]) -> Finding:
    """Call `rule`, and return a finding (a line of the preflight output).

    The finding has the text that `rule` returns, or the message of the UserError that `rule` raises.

    Args:
        about: the subject of the finding, such as "precision".
    """
    try:
        return Finding("✓", about, rule())
    except UserError as error:
        return Finding("✗", about, str(error))


def check_division(recipe: TrainingRecipe, cards: int) -> Finding:
    """Check that the tokens of a step can be divided evenly over `cards` GPUs."""

    def divides() -> str:
        plan = plan_run(recipe.training, recipe.data, num_processes=cards)
        gpus = "1 GPU" if cards == 1 else f"{cards} GPUs"
        return f"{plan.micro_batch_size} rows x {gpus} x {plan.gradient_accumulation_steps} accumulation steps"

    return _judge("step", divides)


def check_links(file: str | None) -> list[Finding]:
    """Return advice about the links between the GPUs.

    `file` is the path of a saved output of `nvidia-smi topo -m`. If it is None, this command is run.
    """
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--topology {file} is not a readable text file ({error}). "
                "Pass a file with the output of `nvidia-smi topo -m`."
            ) from None
    elif command := shutil.which("nvidia-smi"):
        try:
            asked = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            return [Finding("✗", "links", "nvidia-smi does not respond. Restart the machine, or rent another one")]
        text = asked.stdout
    else:
        return []
    try:
        sound, sentence = links.advice(links.parse_topology(text))
    except UserError as error:
        if file:
            raise
        sound, sentence = False, f"nvidia-smi does not show how the GPUs are connected ({error})"
    return [Finding("✓" if sound else "!", "links", sentence)]


def check_sum(cards: int | None) -> Finding:
    """Check that an all-reduce between processes gives the right sum.

    `cards` is the number of processes. If it is None, there is one process per GPU, or two processes on a CPU.
    """
    import torch

    here = torch.cuda.device_count()
    if here and cards and cards > here:
        return Finding(
            "✗", f"all-reduce over {cards} processes", f"This machine has only {here} GPUs. Pass --n {here}"
        )
    return check_all_reduce(cards or here or 2, seconds=DIST_SECONDS)


def check_memory(recipe: TrainingRecipe, work: Workload, memory_bytes: float, cards: int) -> Finding:
    """Check whether the micro-batch fits on a GPU. If not, suggest options.

    The suggested options need less memory. `memory_bytes` is the memory of each GPU, and `cards` the number of GPUs.
    """
    training, length = recipe.training, recipe.data.sequence_length
    estimate = estimate_memory(recipe, work, memory_bytes, cards)
    asked = memory.MemoryTrial(training.per_device_train_batch_size, bool(training.activation_checkpointing))
    a_pass = f"{asked.micro_batch} rows x {length} tokens{', checkpointed,' if asked.checkpointing else ''}"
    usable = f"{size(memory.USABLE * memory_bytes)} of the GPU's {size(memory_bytes)}"
    told = f"{a_pass} need {size(estimate.bytes_of(asked))} (estimated). Usable: {usable}"
    if estimate.fits(asked, memory_bytes):
        return Finding("✓", "memory", told)
    rows = max(1, training.tokens_per_step // length // cards)
    best = estimate.largest(asked, rows, memory_bytes)
    fix = f"Pass {' '.join(best.options)}" if best else "Not even one row fits. Use a larger GPU"
    return Finding("✗", "memory", f"{told}. {fix}")


def measure_cpu(recipe: TrainingRecipe, work: Workload) -> float:
    """Return the training speed of this CPU in tokens per second."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # hide the warning about special ids outside a small vocabulary
    training, length = recipe.training, recipe.data.sequence_length
    # To save time, a large model is measured with only its first blocks and with shorter rows. The speed of the
    # complete model is computed from the FLOPs per token.
    blocks = max(1, int(CPU_BLOCKS / (12 * recipe.model.n_embd**2)))
    model = dataclasses.replace(recipe.model, n_layer=min(recipe.model.n_layer, blocks))
    shape = {"sequence_length": length, "vocab_size": work.vocab_size}
    flops = scale_of(model, **shape).flops_per_token
    tokens = max(64, int(CPU_PASS_FLOPS / flops))
    rows = max(1, min(training.per_device_train_batch_size, tokens // length))
    built = build_model(build_config(model, **shape), attention="causal_sdpa").train()
    bf16 = hardware.choose_bf16(training.bf16, use_cpu=True, accept_any_hardware=True)[0]
    ids = torch.randint(work.vocab_size, (rows, min(length, tokens)))
    seconds = [0.0]
    while sum(seconds) <= CPU_SECONDS:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = built(input_ids=ids, shift_labels=ids).loss
        loss.backward()
        built.zero_grad()
        seconds.append(time.perf_counter() - start)
    return ids.numel() / statistics.median(seconds[1:]) * flops / (work.flops / work.tokens)


def check_time(minutes: float, tokens_per_second: float) -> Finding:
    """Return a line of the preflight output with the run's duration on this CPU.

    Args:
        minutes: the estimated duration.
        tokens_per_second: the measured speed.
    """
    years = minutes / 60 / 24 / 365
    about = f"{years:.1f} years" if years > 1 else duration(60 * max(1, round(minutes)))
    told = f"about {about} on this CPU (measured {tokens_per_second:,.0f} tokens/s)"
    if minutes < MANY_MINUTES:
        return Finding("✓", "time", told)
    return Finding(
        "!",
        "time",
        f"{told}. For a CPU, recipes/own_text.yaml chooses a smaller model. To plan for a GPU, pass --gpu CARD",
    )


def find_micro_batch(recipe: TrainingRecipe, work: Workload, memory_bytes: float | None, cards: int) -> Finding:
    """Train on the prepared data to find the largest micro-batch that fits in memory."""
    data, training = recipe.data, recipe.training
    if not Path(data.dataset_dir, MANIFEST).is_file():
        return Finding("!", "memory", f"not tested, because the data in {data.dataset_dir} is not prepared yet")
    length, most = data.sequence_length, training.per_device_train_batch_size
    rows = training.tokens_per_step // length // cards
    say = functools.partial(print, file=sys.stderr, flush=True)
    say("Searching for the largest micro-batch. Each attempt is a new process and takes 2 to 3 minutes (assumed).")
    launcher = recommended_launcher().command(cards)
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        run, path = Path(scratch, "run"), Path(scratch, "probe.yaml")
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        silent = {"eval_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": "true"}
        # Two steps: the optimizer state is allocated before the second one.
        short = {"max_steps": 2, "warmup_steps": 1, "resume_from": "", "extend_to": 0, "stop_at_step": 0}
        # Pass the folder as an option, because then only the form of its rows must match the recipe.
        options = {"dataset_dir": data.dataset_dir, "output_dir": run, **silent, **short}

        def attempt(trial: memory.MemoryTrial) -> memory.Outcome:
            # Two forward passes per step.
            words = options | {"tokens_per_step": 2 * trial.micro_batch * length * cards}
            typed = [word for name, value in words.items() for word in (f"--{name}", str(value))]
            command = [*launcher, str(REPOSITORY / "train.py"), str(path), *typed]
            shutil.rmtree(run, ignore_errors=True)
            outcome = memory.attempt_command(command, trial, seconds=PROBE_SECONDS)
            say(f"  {' '.join(trial.options)}: {outcome.result}")
            return outcome

        estimate, asked = estimate_memory(recipe, work, memory_bytes, cards), memory.MemoryTrial(most)
        likely = estimate.largest(asked, rows, memory_bytes) if memory_bytes else asked
        outcomes = memory.find_largest(likely.micro_batch if likely else 1, most, rows, attempt)
    if outcomes[-1].result == "failed":
        return Finding("✗", "memory", f"{' '.join(outcomes[-1].trial.options)} failed: {outcomes[-1].said}")
    if found := memory.best(outcomes):
        return Finding("✓", "memory", f"fits: {' '.join(found.options)}")
    return Finding("✗", "memory", "Not even one row fits. Pass a smaller --sequence_length, or use a larger GPU")


def check_data(recipe: TrainingRecipe) -> Finding:
    """Check that the prepared data fits the recipe. Warn if no data is prepared yet."""
    folder = recipe.data.dataset_dir
    if not Path(folder, MANIFEST).is_file():
        return Finding("!", "data", f"{folder} is not prepared yet")

    opened = functools.partial(PreparedData.open, recipe.data, typed=recipe.typed, recipe=recipe.path)
    return _judge("data", lambda: f"{opened().path} has the settings of the recipe")
