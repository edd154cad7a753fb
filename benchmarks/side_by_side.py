"""Draw the loss curves of real_run.py and format the results as a table."""

import datetime
import os
import platform
import statistics
from pathlib import Path
from typing import Any


def apart(ours: list[float], theirs: list[float], after: int) -> dict[str, float]:
    """Return mean and maximum of the absolute loss differences after step `after`."""
    differences = [abs(a - b) for a, b in zip(ours[after:], theirs[after:], strict=True)]
    return {"mean": statistics.mean(differences), "max": max(differences)}


def draw(ours: list[float], theirs: list[float], *, killed: int, resumed: int, tolerance: float, path: Path) -> None:
    """Draw two loss curves and, below the curves, the difference of the losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(ours) + 1)
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(2, 1), layout="constrained"
    )
    above.plot(steps, theirs, color="black", linewidth=2.4, label="bare PyTorch loop")
    above.plot(steps, ours, color="tab:orange", linewidth=1.1, label="train.py under ZeRO-1")
    above.set_ylabel("training loss, nats per token")
    below.plot(steps, [a - b for a, b in zip(ours, theirs, strict=True)], color="tab:orange", linewidth=1)
    below.axhspan(-tolerance, tolerance, color="grey", alpha=0.2, linewidth=0, label=f"±{tolerance}")
    below.set_ylabel("train.py minus the loop")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.axvline(killed, color="tab:red", linestyle="--", linewidth=1, label=f"killed after step {killed}")
        axes.axvline(resumed, color="tab:green", linestyle=":", linewidth=1.4, label=f"resumed from step {resumed}")
        axes.grid(alpha=0.3)
    above.legend()
    below.legend(handles=below.get_legend_handles_labels()[0][:1], loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(results: dict[str, Any]) -> str:
    """Return a Markdown block for RESULTS.md with the results of all finished phases."""
    phases = results["phases"]
    lines = (
        heading(phases.get("train", {}).get("environment", {}))
        + [f"`{command}`" for command in results["commands"]]
        + [""]
    )
    lines += ["| measurement | value |", "| --- | --- |"]
    lines += [f"| {what} | {measured} |" for what, measured in facts(phases)]
    for phase, found in phases.items():
        lines += [
            f"| {phase}: {what} | {'yes' if passed else '**NO**'} |"
            for what, passed in found.get("checks", {}).items()
        ]
    return "\n".join(lines)


def heading(environment: dict[str, Any]) -> list[str]:
    """Return lines about the machine, the software and the training run.

    The lines contain the date, the versions, the commit, the model size and the number of steps. If `environment` is
    empty, the only line is the date.
    """
    today = f"{datetime.date.today()}"
    if not environment:
        return [today]
    accelerator, plan = environment["accelerator"], environment["plan"]
    machine = f"{accelerator['count']} x {accelerator['name']}"
    if accelerator["kind"] == "cpu":
        machine = f"{cpu_name()}, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    batch = f"{plan['num_processes']} x {plan['micro_batch_size']} x {plan['sequence_length']}"
    return [
        f"{today}, {machine}, {versions}, commit {environment['commit']}",
        f"{environment['parameters']:,} parameters, {plan['max_steps']} steps of {plan['tokens_per_step']:,} tokens, "
        f"{batch} tokens per pass, {environment['precision']}, {environment['attention'].split()[0]}",
    ]


def cpu_name() -> str:
    """Return the CPU model from /proc/cpuinfo.

    If the CPU model is unknown, return the architecture.
    """
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1] for line in info.read_text(encoding="utf-8").splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0].strip() if names else platform.machine()


def facts(phases: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the results of the finished phases as pairs of description and value."""
    found = []
    for phase in phases:
        if "seconds" in phases[phase]:
            found.append((f"{phase}, total time", f"{phases[phase]['seconds']:.1f} s"))
    if counts := phases.get("prepare", {}).get("manifest", {}).get("counts"):
        words = ", ".join(
            f"{split} {count['tokens']:,} in {count['documents']:,} documents" for split, count in counts.items()
        )
        found.append(("prepared tokens", words))
    if "environment" in (train := phases.get("train", {})):
        engine = train["environment"]["engine"]
        shown = (
            "engine",
            "zero_optimizer",
            "weights",
            "matrix_products",
            "master_weights",
            "gradient_sums",
            "compiled",
        )
        found += [
            ("engine", ", ".join(f"{key} {engine[key]}" for key in shown if key in engine)),
            ("start of the process to first validation", f"{train['seconds_to_validation']:.1f} s"),
            ("start of the process to first step", f"{train['seconds_to_first_step']:.1f} s"),
            (f"SIGKILL after step {train['killed_at']} to next step", f"{train['seconds_to_next_step']:.1f} s"),
            (
                f"the {train['killed_at'] - train['checkpoint']} repeated steps: largest loss difference",
                f"{train['difference_when_repeated']:.1e}",
            ),
            ("ZeRO-1, median after warm-up", f"{train['tokens_per_second']:,.0f} tokens/s"),
            ("MFU (6N + 12LCT)", f"{train['mfu']:.1%}" if train["mfu"] else "-"),
            ("share of time waiting for data", f"{train['data_wait']:.2%}"),
        ]
    if export := phases.get("export"):
        found.append(
            (
                f"fp32 loss of final/ in stock transformers, last validation loss, {export['rows']} rows",
                f"{export['loss']:.4f}, {export['eval_loss']:.4f}",
            )
        )
        found.append(("final/", f"{export['vocab_size']:,} ids, {export['dtype']}, {export['activation_function']}"))
    if bare := phases.get("bare"):
        found.append(("bare loop, one process, median after warm-up", f"{bare['tokens_per_second']:,.0f} tokens/s"))
    for phase in ("train", "bare"):
        if peak := phases.get(phase, {}).get("peak_mib"):
            found.append((f"{phase}: peak GPU memory in use (nvidia-smi)", f"{peak:,} MiB"))
    if compared := phases.get("compare"):
        after = f"after step {compared['settled']}"
        scopes = {
            "all": "training loss difference from the bare loop, all steps",
            "after": f"training loss difference from the bare loop, {after}",
            "again": f"difference of two bare loops, one with half the micro-batch size, {after}",
        }
        for scope, words in scopes.items():
            if compared[scope]:
                found.append((words, f"mean {compared[scope]['mean']:.5f}, max {compared[scope]['max']:.5f}"))
        found.append(("speed per process under ZeRO-1, relative to the bare loop", f"{compared['speed_ratio']:.3f}"))
    return found
