"""Measure training on a GPU with the product's own commands, within a time limit.

    python benchmarks/gpu.py --minutes 8 --out gpu --data_files 'books/*.jsonl.gz' --tokenizer ../gpt2 \\
        --llmc ../llm.c/train_gpt2cu --nanogpt ../nanoGPT
    python benchmarks/gpu.py --parts variants --variants flash_attention_2 rows_128 --data_files 'books/*.jsonl.gz'
    python benchmarks/gpu.py --use_cpu --out gpu           # test this script: a tiny model, text of Python's manual

Every part starts train.py under ZeRO-1 on the same prepared text. The parts, in this order:

programs   llm.c's train_gpt2 with different options, on the same tokens with the same batch. One process.
train      Train with an empty compiler cache and saves, kill all processes with SIGKILL, and start the command again.
           With --check_copies, saved files are compared with the hashes of the tensors when the save began.
profile    The kernels of one step, by group.
kernels    Single kernels that could replace those of the model, with their errors, in 70 s: kernels.py, which lists the
           packages that they need. It needs no text, and can be the first part (--parts kernels train ...).
variants   The same training with other options, see gpu_variants.py, until the time is over.
memory     The peak memory at 8 to 128 rows per pass and the estimate of preflight, with and without the Triton kernel
           of the loss. Not by default.
nanogpt    nanoGPT's train.py, like llm.c. Not by default.
paired     train.py on one process, train.py under ZeRO-1 and nanoGPT in turn, for --rounds rounds. Not by default.

The variants hopper, quack_loss, quack_mlp, quack_mlp_tuned and flash_attention_4 need
`pip install 'flash-attn-4[cu13]==4.0.0b36'`, into the folder of flash-attn 2 if that is installed. It brings QuACK.
Measure only those variants that the part kernels has found to be faster. kernels.py says how to copy the packages to a
machine without a network.

Each result is printed and appended to results.jsonl in --out at once, and so are the logs. The tables are in gpu.md.
With --archive, all of these are also in one file, which is replaced after each result and every 15 s: a call that is
killed leaves its results. Runs and checkpoints of 2 GB are in a temporary folder (TMPDIR). If a part fails, its error
is its result; if the text cannot be prepared, no part starts. Options after `--` are passed to train.py and
prepare_data.py.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_results import (
    SETTLED,
    Results,
    cause,
    compared,
    kernel_results,
    peak_of,
    shown,
    speed_of,
    start_of,
    summary,
    tables,
)
from benchmarks.gpu_variants import (
    AS_IT_IS,
    LLMC_VARIANTS,
    VARIANTS,
    Variant,
    cuda_libraries,
    cutlass_folders,
    obstacle,
)
from benchmarks.machine import describe
from benchmarks.patched_train import PROFILED_STEP
from benchmarks.processes import SAVED, Finished, gpu_query, logged, run_logged
from benchmarks.token_files import write_token_files
from gpt2_repro.checkpoints.rotation import newest_step
from gpt2_repro.launchers import LAUNCHERS
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.planning.workload import estimate_memory, workload_of
from gpt2_repro.recipe import load_recipe
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import RECIPE


PARTS = ("programs", "train", "profile", "kernels", "variants", "memory", "nanogpt", "paired")
BY_DEFAULT = PARTS[:5]
PROCESS_SECONDS = 200  # time limit of one process
VARIANT_SECONDS = 130  # time limit of a variant
KERNELS = "benchmarks/kernels.py"
KERNEL_SECONDS = 70  # time limit that kernels.py observes itself; its process has 20 s more
FIRST_SECONDS = 75  # how long a variant is assumed to take until one has run
MEMORY_KERNELS = {"triton": "", "torch": "torch_softmax"}  # patches by the softmax kernel of the loss
# The lines of a step. The group is its time in milliseconds.
LLMC_STEP = re.compile(r"^step +\d+/\d+ \|.*\| ([\d.]+) ms \|", re.MULTILINE)
NANOGPT_STEP = re.compile(r"^iter \d+: loss \S+, time ([\d.]+)ms", re.MULTILINE)
# A model that a CPU trains with the rows per step and the micro-batches of the real one.
TINY = "--use_cpu --dataloader_num_workers 0 --sequence_length 16 --tokens_per_step 8192"
TINY += " --n_layer 2 --n_head 2 --n_embd 32"


class Bench:
    """The parts of the benchmark, and their results."""

    def __init__(self, args: argparse.Namespace, further: list[str], work: Path) -> None:
        self.args, self.out, self.work = args, args.out.resolve(), work
        self.began = time.monotonic()
        self.options = [*(TINY.split() if args.use_cpu else []), *further]
        self.recipe = load_recipe([args.recipe, *self.options])
        self.length, training = self.recipe.data.sequence_length, self.recipe.training
        self.tokens_per_step, self.rows = training.tokens_per_step, training.per_device_train_batch_size
        is_prepared = args.data_files and Path(args.data_files[0], MANIFEST).is_file()
        self.data = Path(args.data_files[0]).resolve() if is_prepared else work / "data"
        self.environment = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "PYTHONUNBUFFERED": "1"}
        folders = cutlass_folders()
        sys.path.extend(folders)
        paths = [*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        has_tokenizer = args.tokenizer is not None and Path(args.tokenizer).exists()
        if is_prepared or has_tokenizer:
            self.environment["HF_HUB_OFFLINE"] = "1"
        self.files = Results(self.out, args.archive)
        self.results = self.files.entries
        self.kernel: list[str] = []  # the option for the attention kernel that `auto` has chosen
        self.machine = [describe("torch", "transformers", "accelerate", "deepspeed")]
        self.machine += gpu_query("name,driver_version,memory.total")

    def left(self) -> float:
        """Return the remaining seconds."""
        return 60 * self.args.minutes - (time.monotonic() - self.began)

    def record(self, part: str, name: str, **values: Any) -> None:
        """Print a result, and append it to results.jsonl."""
        result = {"part": part, "name": name, **values}
        self.files.add(result)
        print(f"[{time.monotonic() - self.began:.0f} s] {part}, {name}: {shown(values)}", flush=True)
        self.files.write_tables(self.tables())

    def attempt(self, part: str, name: str, measure: Callable[..., dict[str, Any] | None], *arguments: Any) -> bool:
        """Call `measure`, and record the values that it returns. If it fails, record the error and return False."""
        try:
            values = measure(*arguments)
        except (Exception, SystemExit) as error:
            self.record(part, name, error=cause(error))
            return False
        if values:
            self.record(part, name, **values)
        return True

    def call(
        self,
        command: list[str],
        log: str,
        env: Mapping[str, str] | None = None,
        limit: float = PROCESS_SECONDS,
        **options: Any,
    ) -> Finished:
        """Run a command until it ends, for at most `limit` seconds."""
        seconds = min(self.left(), limit)
        if seconds <= 0:
            sys.exit("no time is left")
        # Bytecode is kept, as it is for users. Otherwise each start compiles the source of all modules.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | self.environment | dict(env or {})
        return run_logged(command, log=self.out / log, timeout=seconds, env=environment, **options)

    def prepare(self) -> None:
        """Prepare the text, unless --data_files is a prepared folder."""
        if self.data != self.work / "data":
            return
        args, rows = self.args, self.recipe.training.per_device_eval_batch_size
        words = ["--data_files", *args.data_files] if args.data_files else ["--source", "embedded"]
        words += ["--tokenizer", args.tokenizer or ("train:1024" if args.use_cpu else self.recipe.data.tokenizer)]
        words += ["--dataset_dir", str(self.data), "--sequence_length", str(self.length)]
        words += ["--split", "head", "--validation_tokens", str(rows * self.length + 1)]
        done = self.call([sys.executable, "prepare_data.py", args.recipe, *words], "prepare.log")
        self.record("prepare", "text", seconds=round(done.seconds, 1))

    def command(self, variant: Variant, run: Path, steps: int, *options: str) -> list[str]:
        """Return the command that trains a variant."""
        launcher, words = LAUNCHERS.get(variant.launcher), [sys.executable]
        if launcher:
            words = launcher.command("--num_processes", str(self.args.processes), "--main_process_port", "0")
        words += ["benchmarks/patched_train.py" if variant.patch else "train.py", self.args.recipe]
        words += ["--dataset_dir", str(self.data), "--output_dir", str(run), "--max_steps", str(steps)]
        words += ["--warmup_steps", str(min(20, steps // 2)), "--logging_steps", "1", "--disable_tqdm", "true"]
        words += ["--eval_tokens", str(self.recipe.training.per_device_eval_batch_size * self.length)]
        words += ["--hellaswag_steps", "0", *self.options, *options, *self.kernel]
        return [*words, *variant.options.split()]

    def measure(self, variant: Variant, steps: int) -> dict[str, Any]:
        """Train a variant without validations and saves, and return its measurements."""
        run, done = self.train_variant(variant, steps)
        results = speed_of(run, done)
        self.kernel = self.kernel or ["--attn_implementation", results["attention"].partition(" ")[0]]
        shutil.rmtree(run)
        return results

    def train_variant(self, variant: Variant, steps: int) -> tuple[Path, Finished]:
        """Train a variant until its last step is logged: final/ would take another 10 s. Return its run directory."""
        run = self.work / variant.name
        command = self.command(variant, run, steps, "--eval_steps", "0", "--save_strategy", "no")
        # torch's cache could return code that was compiled without the patch.
        shares = variant.patch in ("", "profile")
        cache = {} if shares else {"TORCHINDUCTOR_CACHE_DIR": str(self.work / f"inductor_{variant.name}")}
        environment = {**variant.environment, **cache, "BENCHMARK_PATCH": variant.patch}
        environment["BENCHMARK_FILE"] = str(self.out / "profile.json")

        def is_trained() -> bool:
            return steps in logged(run)

        done = self.call(command, f"{variant.name}.log", environment, VARIANT_SECONDS, stop=is_trained)
        return run, done

    def train(self) -> None:
        """Measure speed, saves, memory and starts, before and after SIGKILL."""
        run, steps = self.work / "train", self.args.steps
        variant, copies = AS_IT_IS, self.out / "copies.json"
        if self.args.check_copies:
            variant = Variant(AS_IT_IS.name, patch="check_copies")
            copies.unlink(missing_ok=True)
        environment = {"BENCHMARK_PATCH": variant.patch, "BENCHMARK_FILE": str(copies)}
        command = self.command(variant, run, steps, "--eval_steps", str(steps), "--save_steps", str(steps // 3))

        def is_time() -> bool:
            newest = newest_step(run)
            return newest > 0 and max(logged(run), default=0) >= newest + 3

        first = self.call(command, "train_1.log", environment, stop=is_time)
        speed = speed_of(run, first, last=steps // 3)
        self.record("train", AS_IT_IS.name, **speed)
        self.kernel = ["--attn_implementation", speed["attention"].partition(" ")[0]]
        self.record("train", "peak memory", **self.memory(run, first.peak_mib))
        before, newest = logged(run), newest_step(run)
        self.record("train", "start, empty compiler cache", **start_of(run, before[1]["time"] - first.began))
        if not first.killed:
            sys.exit("The run ended before it could be killed. Pass a larger --steps.")
        second = self.call(command, "train_2.log", environment)
        after = logged(run)
        self.record("train", "SIGKILL to the next step", **start_of(run, after[newest + 1]["time"] - first.ended))
        repeated = [step for step in before if step > newest]
        keys = ("loss", "grad_norm")
        equal = all(before[step][key] == after[step][key] for step in repeated for key in keys)
        self.record("train", "repeated steps", steps=repeated, losses_and_norms_are_equal=equal)
        texts = [(self.out / f"train_{number}.log").read_text(encoding="utf-8") for number in (1, 2)]
        sizes, complete, paused = zip(*SAVED.findall("".join(texts)), strict=True)
        self.record("train", "saves", megabytes=sizes[-1], paused_s=paused, complete_after_s=complete)
        if self.args.check_copies:
            lines = copies.read_text(encoding="utf-8").splitlines() if copies.is_file() else []
            for line in lines:
                self.record("train", "copy of a checkpoint", **json.loads(line))
            if not lines:
                self.record("train", "copy of a checkpoint", error="no checkpoint was saved in the background")
        resumed = speed_of(run, second, first=newest + SETTLED)
        self.record("train", "after the resume, with saves", **resumed)

    def memory(self, run: Path, peak_mib: int) -> dict[str, Any]:
        """Return the measured peak, and the estimate of preflight."""
        environment = RunRecord(run).environment()
        recipe = load_recipe([str(run / RECIPE)])
        plan = environment.plan
        estimate = estimate_memory(
            recipe, workload_of(recipe), environment.accelerator.memory_bytes, plan.num_processes
        )
        return compared(peak_mib * 2**20, estimate.bytes_of(MemoryTrial(plan.micro_batch_size)))

    def estimated_bytes(self, rows: int, memory_bytes: float) -> float:
        """Return the estimate of preflight for a number of rows per pass."""
        recipe = load_recipe([self.args.recipe, *self.options, "--per_device_train_batch_size", str(rows)])
        estimate = estimate_memory(recipe, workload_of(recipe), memory_bytes, self.args.processes)
        return estimate.bytes_of(MemoryTrial(rows))

    def measure_memory(self, rows: int, patch: str) -> dict[str, Any]:
        """Train with a number of rows per pass, and compare the peak with the estimate."""
        options = f"--per_device_train_batch_size {rows}"
        variant = Variant(f"memory_{rows}_{patch or 'triton'}", options, patch=patch)
        run, done = self.train_variant(variant, SETTLED)
        values = self.memory(run, done.peak_mib)
        shutil.rmtree(run)
        return values

    def measured_rows(self) -> list[int]:
        """Return the rows of the part memory that the GPU has memory for, and record the others."""
        sizes = [int(line) for line in gpu_query("memory.total") if line.isdigit()]
        if not sizes:
            return self.args.memory_rows
        memory_bytes = min(sizes) * 2**20
        fitting: list[int] = []
        for rows in self.args.memory_rows:
            needed = self.estimated_bytes(rows, memory_bytes)
            if needed <= memory_bytes:
                fitting.append(rows)
                continue
            error = f"needs {needed / 1e9:.1f} GB (estimated), and the GPU has {memory_bytes / 1e9:.1f} GB"
            self.record("memory", f"{rows} rows", error=error)
        return fitting

    def measure_all_memory(self) -> None:
        """Compare the estimate of preflight with the measured peak, with each softmax kernel of the loss."""
        longest = float(FIRST_SECONDS)
        for rows in self.measured_rows():
            for kernel, patch in MEMORY_KERNELS.items():
                if self.left() < longest:
                    self.record("memory", f"{rows} rows, {kernel}", error="no time is left")
                    continue
                began = time.monotonic()
                self.attempt("memory", f"{rows} rows, {kernel}", self.measure_memory, rows, patch)
                longest = time.monotonic() - began

    def programs(self) -> None:
        """Measure llm.c with its own program and different options, and name the fastest."""
        args = self.args
        if args.llmc is None:
            print("--llmc was not passed, and is left out.")
            return
        self.write_token_files()
        speeds: dict[str, int] = {}
        for name, options in LLMC_VARIANTS.items():
            words = f"-e d12 -b {self.rows} -t {self.length} -d {self.tokens_per_step} -z 1 -c 0.1"
            words += f" -l 0.0006 -q 0.0 -u 20 -n 0 -v 1000 -m 1 -s 0 -h 0 -x {args.steps_of_others} {options}"
            tokens = str(self.work / "llmc_*.bin")
            command = [str(args.llmc.resolve()), "-i", tokens, "-j", tokens, "-o", "log", *words.split()]
            if self.attempt("programs", name, self.program, name, command, LLMC_STEP):
                speeds[name] = self.results[-1]["tokens_per_second"]
        if speeds:
            fastest = max(speeds, key=lambda name: speeds[name])
            self.record("programs", "fastest llm.c", variant=fastest, speed=speeds[fastest])

    def measure_nanogpt(self) -> None:
        """Measure nanoGPT with its own program."""
        if self.args.nanogpt is None:
            print("--nanogpt was not passed, and is left out.")
            return
        self.write_token_files()
        command = self.nanogpt_command()
        self.attempt("nanogpt", "nanoGPT", self.program, "nanoGPT", command, NANOGPT_STEP, self.args.nanogpt)

    def nanogpt_command(self) -> list[str]:
        """Return the command that trains the same model with nanoGPT, in its folder."""
        args, model = self.args, self.recipe.model
        words = f"--dataset={self.work} --out_dir={self.work / 'nanogpt'} --batch_size={self.rows}"
        words += f" --gradient_accumulation_steps={self.tokens_per_step // self.length // self.rows}"
        words += f" --block_size={self.length} --n_layer={model.n_layer} --n_head={model.n_head}"
        words += f" --n_embd={model.n_embd} --bias=True --dropout=0.0 --max_iters={args.steps_of_others}"
        words += " --warmup_iters=20 --eval_interval=100000 --eval_iters=1 --log_interval=1"
        words += " --device=cpu --compile=False --dtype=float32" if args.use_cpu else ""
        return [sys.executable, "train.py", *words.split()]

    def program(self, name: str, command: list[str], step: re.Pattern[str], cwd: Path | None = None) -> dict[str, Any]:
        """Run a program that prints the milliseconds of each step, and return its speed."""
        log = f"{re.split('[^a-zA-Z.]', name)[0]}{len(self.results)}.log"
        libraries = ":".join([*cuda_libraries(), os.environ.get("LD_LIBRARY_PATH", "")])
        done = self.call(command, log, {"LD_LIBRARY_PATH": libraries}, cwd=cwd or self.work)
        times = step.findall((self.out / log).read_text(encoding="utf-8"))
        return summary([self.tokens_per_step / float(time) * 1e3 for time in times[SETTLED:]]) | peak_of(done)

    def write_token_files(self) -> None:
        """Write the rows of the training split as token files of nanoGPT and llm.c."""
        num_rows = (self.args.steps_of_others + 2) * self.tokens_per_step // self.length
        write_token_files(self.data, self.work, num_rows)

    def profile(self) -> None:
        """Record how long the kernels of one step take, by group."""
        self.measure(Variant("profile", patch="profile"), PROFILED_STEP + 2)
        profile = json.loads((self.out / "profile.json").read_text(encoding="utf-8"))
        times = {name: round(ms, 2) for name, ms in [*profile["groups"].items(), ("no kernel", profile["no kernel"])]}
        self.record("profile", "one step, ms", total=round(profile["ms"], 2), **times)
        gigabytes = round(profile["allocated_bytes"] / 1e9, 2)
        self.record("profile", "step", host_syncs=profile["host syncs"], allocated_gb=gigabytes)
        for kernel in profile["kernels"][:40]:
            values = {"ms": round(kernel["ms"], 2), "calls": kernel["calls"], "group": kernel["group"]}
            self.record("profile", kernel["name"][:80], **values)

    def kernels(self) -> None:
        """Compare single kernels in a process of their own, and record what it has measured, however it ends."""
        file = self.out / "kernels.jsonl"
        file.unlink(missing_ok=True)
        seconds = min(KERNEL_SECONDS, self.left() - 5)
        command = [sys.executable, KERNELS, "--out", str(self.out), "--seconds", f"{seconds:.0f}"]
        if self.args.use_cpu:
            command += ["--device", "cpu", "--small"]
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor_kernels")}
        try:
            self.call(command, "kernels.log", environment, KERNEL_SECONDS + 20)
        finally:
            for entry in kernel_results(file):
                name = f"{entry.pop('group')}, {entry.pop('name')}"
                self.record("kernels", name, **entry)

    def variants(self) -> None:
        """Measure variants until the time is over."""
        chosen = [each for each in VARIANTS if each.name in self.args.variants or not self.args.variants]
        if not any(result["name"] == AS_IT_IS.name for result in self.results):
            chosen = [AS_IT_IS, *chosen]
        longest = float(FIRST_SECONDS)
        is_first = True
        measured: set[str] = set()
        for number, variant in enumerate(chosen):
            problem = obstacle(variant, measured)
            if problem is not None:
                self.record("variants", variant.name, error=problem)
                continue
            if self.left() < longest:
                names = ", ".join(each.name for each in chosen[number:])
                self.record("variants", "not measured", error=f"no time is left for: {names}")
                return
            began = time.monotonic()
            if self.attempt("variants", variant.name, self.measure, variant, self.args.variant_steps):
                measured.add(variant.name)
            seconds = time.monotonic() - began
            longest = seconds if is_first else max(longest, seconds)
            is_first = False

    def paired(self) -> None:
        """Compare the steps of train.py with those of nanoGPT in the same round."""
        self.write_token_files()
        ratios: dict[str, list[float]] = {}
        words = "--logging_steps 10"  # as by default
        for number in range(self.args.rounds):
            nanogpt = self.program("nanoGPT", self.nanogpt_command(), NANOGPT_STEP, self.args.nanogpt)
            for variant in (Variant("one_process", words, launcher="python"), Variant("zero1", words)):
                speed = self.measure(variant, self.args.steps_of_others)
                ratio = nanogpt["tokens_per_second"] / speed["tokens_per_second"]
                self.record("paired", f"round {number}, {variant.name}", step_relative_to_nanogpt=round(ratio, 3))
                ratios.setdefault(variant.name, []).append(ratio)
        for name, values in ratios.items():
            text = f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            self.record("paired", f"{name}, {len(values)} rounds", step_relative_to_nanogpt=text)

    def tables(self) -> str:
        """Return all results as Markdown."""
        return tables(self.results, self.machine, self.args.processes)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those after `--`."""
    own, further = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/gpt2_124m.yaml", help="Recipe to train.")
    parser.add_argument("--minutes", type=float, default=8, help="Time limit of all parts. (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="Folder for results and logs. (default: gpu)")
    parser.add_argument("--archive", type=Path, help="A .tar.gz with all results and logs, replaced every 15 s.")
    parser.add_argument("--data_files", nargs="+", help="Text or a prepared folder. (default: Python's manual)")
    parser.add_argument("--tokenizer", help="Tokenizer for the text, a folder or Hub id. (default: the recipe's)")
    parser.add_argument("--llmc", type=Path, help="Program train_gpt2cu of llm.c.")
    parser.add_argument("--nanogpt", type=Path, help="Folder of a nanoGPT checkout.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=BY_DEFAULT, help="Parts to run, in this order.")
    names = [each.name for each in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=[], help="Only these.")
    rows = [8, 16, 32, 64, 128]
    parser.add_argument("--memory_rows", nargs="+", type=int, default=rows, help="Rows per pass of the part memory.")
    parser.add_argument("--steps", type=int, default=36, help="Steps of the part train. (default: %(default)s)")
    parser.add_argument("--variant_steps", type=int, default=25, help="Steps of a variant. (default: %(default)s)")
    parser.add_argument("--steps_of_others", type=int, default=25, help="Steps of llm.c and nanoGPT. (default: 25)")
    parser.add_argument("--rounds", type=int, default=10, help="Rounds of the part paired. (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="Processes of train.py. (default: the number of GPUs)")
    parser.add_argument("--check_copies", action="store_true", help="Compare saved files with hashes of the tensors.")
    parser.add_argument("--use_cpu", action="store_true", help="Train a tiny model on the CPU.")
    args = parser.parse_args(own)
    if not (args.use_cpu or len(gpu_query("name"))):
        parser.error("No GPU found. Pass --use_cpu to test this script.")
    args.processes = args.processes or (1 if args.use_cpu else len(gpu_query("name")))
    return args, further


def main(argv: list[str]) -> None:
    """Run the parts one after another, and print the tables."""
    args, further = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes are killed
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        bench = Bench(args, further, Path(temporary))
        parts: dict[str, Callable[[], None]] = {
            "programs": bench.programs,
            "train": bench.train,
            "profile": bench.profile,
            "kernels": bench.kernels,
            "variants": bench.variants,
            "memory": bench.measure_all_memory,
            "nanogpt": bench.measure_nanogpt,
            "paired": bench.paired,
        }
        try:
            if bench.attempt("prepare", "failed", bench.prepare):
                for part in args.parts:
                    bench.attempt(part, "failed", parts[part])
        except KeyboardInterrupt:
            print("interrupted")
        bench.files.write_tables(bench.tables())
        bench.files.close()
        print(f"\n{bench.tables()}")


if __name__ == "__main__":
    main(sys.argv[1:])
