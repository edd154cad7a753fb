"""Check whether the devices of this machine can train a recipe, and measure a CPU."""

import time
from collections.abc import Callable, Collection
from pathlib import Path

from gpt2_repro import hardware
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.attention import Machine, choose_attention
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.preflight.cost import Workload
from gpt2_repro.text import Finding


CPU_PASSES, CPU_PASS_FLOPS = 3, 2e11


def check_devices(
    data: DataArguments,
    model: ModelArguments,
    *,
    rows: int,
    bf16: bool,
    torch_compile: bool | None,
    rules: dict[str, bool],
) -> list[Finding]:
    """Check the driver, the devices, and whether they support a recipe's options.

    The options are the precision, torch.compile and the attention implementation.

    Args:
        rows: the micro-batch.
        rules: `use_cpu` and `accept_any_hardware`.
    """
    version = hardware.nvidia_driver()
    driver = Finding("✓" if version else "!", "driver", version or "no NVIDIA device")
    try:
        on_cpu = hardware.choose_device(use_cpu=rules["use_cpu"], accept_any_hardware=rules["accept_any_hardware"])
    except UserError as error:
        return [driver, Finding("✗", "device", str(error))]
    rules |= {"use_cpu": on_cpu}
    machine = Machine(not on_cpu, bf16, data.sequence_length, document_mask=model.document_mask)
    config = build_config(model, sequence_length=data.sequence_length, vocab_size=128)
    here = hardware.find_accelerator(use_cpu=on_cpu)
    gpus = f"{here.count} x {here.name}, {(here.memory_bytes or 0) / 1e9:.0f} GB each"
    return [
        driver,
        Finding("✓", "device", f"the CPU, {hardware.cpu_cores()} cores" if on_cpu else gpus),
        judge("precision", lambda: hardware.choose_bf16(bf16, **rules)[1]),
        judge("torch.compile", lambda: "on" if hardware.choose_compile(torch_compile, **rules) else "off"),
        judge("attention", lambda: str(choose_attention(model.attn_implementation, machine, config, rows=rows))),
    ]


def judge(about: str, rule: Callable[[], str]) -> Finding:
    """Return a finding with the text that `rule` returns, or with its UserError."""
    try:
        return Finding("✓", about, rule())
    except UserError as error:
        return Finding("✗", about, str(error))


def check_data(data: DataArguments, *, typed: Collection[str], recipe: Path) -> Finding:
    """Check that the prepared data fits the recipe."""
    if not Path(data.dataset_dir, MANIFEST).is_file():
        return Finding("!", "data", f"{data.dataset_dir} is not prepared yet")
    return judge(
        "data", lambda: f"{PreparedData.open(data, typed=typed, recipe=recipe).path} has the settings of the recipe"
    )


def measure_cpu(data: DataArguments, model: ModelArguments, work: Workload, *, rows: int, bf16: bool) -> float:
    """Return the tokens per second of this CPU, with fewer rows if a pass would take long."""
    import torch

    length = data.sequence_length
    rows = max(1, min(rows, int(CPU_PASS_FLOPS * work.tokens / work.flops / length)))
    config = build_config(model, sequence_length=length, vocab_size=work.vocab_size)
    built = build_model(config, attention="causal_sdpa").train()
    bf16 = hardware.choose_bf16(bf16, use_cpu=True, accept_any_hardware=True)[0]
    ids = torch.randint(work.vocab_size, (rows, length))
    fastest = float("inf")
    for _ in range(CPU_PASSES):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = built(input_ids=ids, shift_labels=ids).loss
        loss.backward()
        built.zero_grad()
        fastest = min(fastest, time.perf_counter() - began)
    return ids.numel() / fastest
