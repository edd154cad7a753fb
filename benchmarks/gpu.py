"""Measure training on a GPU with the product's own commands, within a time limit.

    python benchmarks/gpu.py --minutes 8 --out gpu --data_files 'books/*.jsonl.gz' --tokenizer ../gpt2 \\
        --llmc ../llm.c/train_gpt2cu --nanogpt ../nanoGPT
    python benchmarks/gpu.py --parts variants --variants flash_attention_2 rows_128 --data_files 'books/*.jsonl.gz'
    python benchmarks/gpu.py --use_cpu --out gpu           # test this script: a tiny model, text of Python's manual

Every part starts train.py under ZeRO-1 on the same prepared text. The parts, in this order:

train      Train with an empty compiler cache and saves, kill all processes with SIGKILL, and start the command again.
programs   llm.c's train_gpt2 and nanoGPT's train.py, on the same tokens with the same batch. One process each.
profile    The kernels of one step, by group.
variants   The same training with other options, see VARIANTS, until the time is over.
paired     train.py on one process, train.py under ZeRO-1 and nanoGPT in turn, for --rounds rounds. Not by default.

The variants hopper, quack_loss, quack_mlp, quack_mlp_tuned and flash_attention_4 need
`pip install 'flash-attn-4[cu13]==4.0.0b36'`, into the folder of flash-attn 2 if that is installed. It brings QuACK.

Each result is printed and appended to results.jsonl in --out at once, and so are the logs. The tables at the end are
also in gpu.md. Runs and checkpoints of 2 GB are in a temporary folder (TMPDIR). If a part fails, its error is its
result. Options after `--` are passed to train.py and prepare_data.py.
"""

import argparse
import importlib.util
import json
import os
import pickle
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.machine import describe
from benchmarks.patched_train import PROFILED_STEP
from benchmarks.processes import SAVED, Finished, gpu_query, logged, run_logged
from gpt2_repro.checkpoints.rotation import newest_step
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.launchers import LAUNCHERS
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.planning.workload import estimate_memory, workload_of
from gpt2_repro.recipe import load_recipe
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import RECIPE


PARTS = ("train", "programs", "profile", "variants", "paired")
SETTLED = 5  # steps at the start that are not measured
PROCESS_SECONDS = 200  # time limit of one process
# The lines of a step. The group is its time in milliseconds.
LLMC_STEP = re.compile(r"^step +\d+/\d+ \|.*\| ([\d.]+) ms \|", re.MULTILINE)
NANOGPT_STEP = re.compile(r"^iter \d+: loss \S+, time ([\d.]+)ms", re.MULTILINE)
# A model that a CPU trains with the rows per step and the micro-batches of the real one.
TINY = "--use_cpu --dataloader_num_workers 0 --sequence_length 16 --tokens_per_step 8192"
TINY += " --n_layer 2 --n_head 2 --n_embd 32"


class Variant(NamedTuple):
    """A change of the training. The name is that of the run."""

    name: str
    options: str = ""  # of train.py
    environment: Mapping[str, str] = {}
    patch: str = ""  # functions of patched_train.py
    needs: str = ""  # a module that must be installed
    launcher: str = "zero1"  # "python": without one


FA4 = "--attn_implementation causal_sdpa"  # what the patch uses where it does not apply
AS_IT_IS = Variant("as_it_is")
# In the order of the expected gain. Each is measured if the time suffices.
VARIANTS = (
    Variant("hopper", FA4, patch="flash_attention_4 quack_mlp quack_loss", needs="quack"),
    Variant("quack_loss", patch="quack_loss", needs="quack"),
    Variant("quack_mlp", patch="quack_mlp", needs="quack"),
    Variant("flash_attention_4", FA4, patch="flash_attention_4", needs="cutlass"),
    Variant("quack_mlp_tuned", environment={"QUACK_PRINT_AUTOTUNING": "1"}, patch="quack_mlp", needs="quack"),
    Variant("cuda_graphs", environment={"TORCHINDUCTOR_CUDAGRAPHS": "1"}),
    Variant("rows_128", "--per_device_train_batch_size 128"),
    Variant("max_autotune", environment={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    Variant("flash_attention_2", "--attn_implementation flash_attention_2", needs="flash_attn"),
    Variant("causal_sdpa", "--attn_implementation causal_sdpa"),
    Variant("logs_5", "--logging_steps 5"),  # each log line waits for the device
    Variant("document_mask", "--document_mask true --attn_implementation auto"),
    Variant("ddp", launcher="ddp"),
    Variant("import_times", environment={"PYTHONPROFILEIMPORTTIME": "1"}),  # in its log
)


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
        self.results: list[dict[str, Any]] = []
        self.kernel: list[str] = []  # the option for the attention kernel that `auto` has chosen
        self.out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the remaining seconds."""
        return 60 * self.args.minutes - (time.monotonic() - self.began)

    def record(self, part: str, name: str, **values: Any) -> None:
        """Print a result, and append it to results.jsonl."""
        result = {"part": part, "name": name, **values}
        self.results.append(result)
        print(f"[{time.monotonic() - self.began:.0f} s] {part}, {name}: {shown(values)}", flush=True)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")

    def attempt(self, part: str, name: str, measure: Callable[..., dict[str, Any] | None], *arguments: Any) -> None:
        """Call `measure`, and record the values that it returns. If it fails, record the error."""
        try:
            if values := measure(*arguments):
                self.record(part, name, **values)
        except (Exception, SystemExit) as error:
            self.record(part, name, error=cause(error))

    def call(self, command: list[str], log: str, env: Mapping[str, str] | None = None, **options: Any) -> Finished:
        seconds = min(self.left(), PROCESS_SECONDS)
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
        run = self.work / variant.name
        command = self.command(variant, run, steps, "--eval_steps", "0", "--save_strategy", "no")
        # torch's cache could return code that was compiled without the patch.
        shares = variant.patch in ("", "profile")
        cache = {} if shares else {"TORCHINDUCTOR_CACHE_DIR": str(self.work / f"inductor_{variant.name}")}
        environment = {**variant.environment, **cache, "BENCHMARK_PATCH": variant.patch}
        environment["BENCHMARK_FILE"] = str(self.out / "profile.json")
        done = self.call(command, f"{variant.name}.log", environment)
        results = speed_of(run, done)
        self.kernel = self.kernel or ["--attn_implementation", results["attention"].partition(" ")[0]]
        shutil.rmtree(run)
        return results

    def train(self) -> None:
        """Measure speed, saves, memory and starts, before and after SIGKILL."""
        run, steps = self.work / "train", self.args.steps
        command = self.command(AS_IT_IS, run, steps, "--eval_steps", str(steps), "--save_steps", str(steps // 3))

        def is_time() -> bool:
            newest = newest_step(run)
            return newest > 0 and max(logged(run), default=0) >= newest + 3

        first = self.call(command, "train_1.log", stop=is_time)
        speed = speed_of(run, first, last=steps // 3)
        self.record("train", AS_IT_IS.name, **speed)
        self.kernel = ["--attn_implementation", speed["attention"].partition(" ")[0]]
        self.record("train", "peak memory", **self.memory(run, first.peak_mib))
        before, newest = logged(run), newest_step(run)
        self.record("train", "start, empty compiler cache", **start_of(run, before[1]["time"] - first.began))
        if not first.killed:
            sys.exit("The run ended before it could be killed. Pass a larger --steps.")
        second = self.call(command, "train_2.log")
        after = logged(run)
        self.record("train", "SIGKILL to the next step", **start_of(run, after[newest + 1]["time"] - first.ended))
        repeated = [step for step in before if step > newest]
        keys = ("loss", "grad_norm")
        equal = all(before[step][key] == after[step][key] for step in repeated for key in keys)
        self.record("train", "repeated steps", steps=repeated, losses_and_norms_are_equal=equal)
        texts = [(self.out / f"train_{number}.log").read_text(encoding="utf-8") for number in (1, 2)]
        sizes, complete, paused = zip(*SAVED.findall("".join(texts)), strict=True)
        self.record("train", "saves", megabytes=sizes[-1], paused_s=paused, complete_after_s=complete)
        resumed = speed_of(run, second, first=newest + SETTLED)
        self.record("train", "after the resume, with saves", **resumed)

    def memory(self, run: Path, peak_mib: int) -> dict[str, Any]:
        """Return the measured peak, and the estimate of preflight."""
        environment, recipe = RunRecord(run).environment(), load_recipe([str(run / RECIPE)])
        memory_bytes, plan = environment.accelerator.memory_bytes, environment.plan
        estimate = estimate_memory(recipe, workload_of(recipe), memory_bytes, plan.num_processes)
        estimated = estimate.bytes_of(MemoryTrial(plan.micro_batch_size)) / 1e9
        return {"nvidia_smi_gb": round(peak_mib * 2**20 / 1e9, 1), "estimated_gb": round(estimated, 1)}

    def programs(self) -> None:
        """Measure llm.c and nanoGPT with their own programs."""
        args = self.args
        for option, path in (("--llmc", args.llmc), ("--nanogpt", args.nanogpt)):
            if path is None:
                print(f"{option} was not passed, and is left out.")
        if args.llmc or args.nanogpt:
            self.write_token_files()
        for recompute in (1, 0) if args.llmc else ():
            name = "llm.c" if recompute else "llm.c, GELU not recomputed (-r 0)"
            words = f"-e d12 -b {self.rows} -t {self.length} -d {self.tokens_per_step} -r {recompute} -z 1 -c 0.1"
            words += f" -l 0.0006 -q 0.0 -u 20 -n 0 -v 1000 -m 1 -s 0 -h 0 -x {args.steps_of_others}"
            files = [word for option in ("-i", "-j") for word in (option, str(self.work / "llmc_*.bin"))]
            command = [str(args.llmc.resolve()), *files, "-o", "log", *words.split()]
            self.attempt("programs", name, self.program, name, command, LLMC_STEP)
        if args.nanogpt:
            self.attempt("programs", "nanoGPT", self.program, "nanoGPT", self.nanogpt(), NANOGPT_STEP, args.nanogpt)

    def nanogpt(self) -> list[str]:
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
        data = PreparedData.read(self.data)
        rows = data.rows("train")
        needed = (self.args.steps_of_others + 2) * self.tokens_per_step // self.length
        chosen = rows[range(min(len(rows), needed))]["input_ids"]
        tokens = np.concatenate([row[:-1] for row in chosen]).astype(np.uint16)  # rows overlap by one token
        for name in ("train.bin", "val.bin"):
            tokens.tofile(self.work / name)
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(tokens)  # the magic number and the version of llm.c's dev/data
        (self.work / "llmc_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())
        (self.work / "log").mkdir(exist_ok=True)  # of llm.c
        if data.manifest.vocab_size < 50_257:  # nanoGPT has GPT-2's vocabulary by default
            (self.work / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.manifest.vocab_size}))

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

    def variants(self) -> None:
        """Measure variants until the time is over."""
        chosen = [each for each in VARIANTS if each.name in self.args.variants or not self.args.variants]
        if not any(result["name"] == AS_IT_IS.name for result in self.results):
            chosen = [AS_IT_IS, *chosen]
        longest = 0.0
        for number, variant in enumerate(chosen):
            if variant.needs and importlib.util.find_spec(variant.needs) is None:
                self.record("variants", variant.name, error=f"{variant.needs} is not installed")
                continue
            if self.left() < longest:
                print(f"no time for: {', '.join(each.name for each in chosen[number:])}")
                return
            start = time.monotonic()
            self.attempt("variants", variant.name, self.measure, variant, self.args.variant_steps)
            longest = max(longest, time.monotonic() - start)

    def paired(self) -> None:
        """Compare the steps of train.py with those of nanoGPT in the same round."""
        self.write_token_files()
        ratios: dict[str, list[float]] = {}
        words = "--logging_steps 10"  # as by default
        for number in range(self.args.rounds):
            nanogpt = self.program("nanoGPT", self.nanogpt(), NANOGPT_STEP, self.args.nanogpt)
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
        speeds = [result for result in self.results if "tokens_per_second" in result]
        ours = next((each["tokens_per_second"] for each in speeds if each["name"] == AS_IT_IS.name), None)
        lines = [describe("torch", "transformers", "accelerate", "deepspeed"), *gpu_query("name,driver_version")]
        lines += [f"`python {' '.join(sys.argv)}`", ""]
        lines += [
            "| part, name | tokens/s (min to max) | relative | peak GB | attention |",
            "| --- | --- | --- | --- | --- |",
        ]
        for each in speeds:
            of_one = self.args.processes if each["part"] == "programs" else 1  # llm.c and nanoGPT run on one card
            relative = f"{each['tokens_per_second'] * of_one / ours:.3f}" if ours else "-"
            form = "| {part}, {name} | {tokens_per_second:,} ({lowest:,} to {highest:,}) "
            rest = f"| {relative} | {each['peak_gb'] or '-'} | {each.get('attention', '-')} |"
            lines.append(form.format(**each) + rest)
        lines += ["", "| part, name | values |", "| --- | --- |"]
        for each in self.results:
            if each not in speeds:
                values = {key: value for key, value in each.items() if key not in ("part", "name")}
                text = " ".join(shown(values).replace("|", " ").split())
                lines.append(f"| {each['part']}, {each['name']} | {text} |")
        return "\n".join(lines) + "\n"


def shown(values: Mapping[str, Any]) -> str:
    """Return measured values as text."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


def cause(error: BaseException) -> str:
    """Return the message of the last error that the output of a command names, or its end."""
    text = str(error)
    named = [line for line in re.findall(r"\w*[Ee]rror: .+", text) if "ChildFailedError" not in line]
    return f"{type(error).__name__}: {named[-1] if named else text[-300:]}"


def summary(speeds: list[float]) -> dict[str, Any]:
    """Return the median and the range of the speeds of the measured steps. Exits without enough steps."""
    if len(speeds) < 2:
        sys.exit(f"{len(speeds)} steps were measured")
    values = {"tokens_per_second": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)}
    return {**{name: round(value) for name, value in values.items()}, "log_lines": len(speeds)}


def peak_of(done: Finished) -> dict[str, Any]:
    return {"peak_gb": round(done.peak_mib * 2**20 / 1e9, 1), "seconds": round(done.seconds, 1)}


def speed_of(run: Path, done: Finished, *, first: int = SETTLED, last: int | None = None) -> dict[str, Any]:
    """Return the speed of the steps after `first` and up to `last` in the log of a run."""
    events = [event for step, event in logged(run).items() if step > first and (last is None or step <= last)]
    timed = [event for event in events if "tokens_per_second" in event]
    speed = summary([event["tokens_per_second"] for event in timed])
    wait = statistics.median(event["data_wait"] for event in timed)
    return {**speed, "data_wait": round(wait, 4), **peak_of(done), "attention": RunRecord(run).environment().attention}


def start_of(run: Path, seconds: float) -> dict[str, Any]:
    """Return the time of a start until the end of its first step, and that of its phases."""
    phases = dict(RunRecord(run).environment().startup)
    return {"seconds": round(seconds, 1), "launcher": round(seconds - sum(phases.values()), 1), **phases}


def cuda_libraries() -> list[str]:
    """Return the folders of the CUDA libraries that torch's wheels have installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or [] if spec else []
    return [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those after `--`."""
    own, further = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/gpt2_124m.yaml", help="Recipe to train.")
    parser.add_argument("--minutes", type=float, default=8, help="Time limit of all parts. (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="Folder for results and logs. (default: gpu)")
    parser.add_argument("--data_files", nargs="+", help="Text or a prepared folder. (default: Python's manual)")
    parser.add_argument("--tokenizer", help="Tokenizer for the text, a folder or Hub id. (default: the recipe's)")
    parser.add_argument("--llmc", type=Path, help="Program train_gpt2cu of llm.c.")
    parser.add_argument("--nanogpt", type=Path, help="Folder of a nanoGPT checkout.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:4], help="Parts to run, in this order.")
    names = [each.name for each in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=[], help="Only these.")
    parser.add_argument("--steps", type=int, default=36, help="Steps of the part train. (default: %(default)s)")
    parser.add_argument("--variant_steps", type=int, default=25, help="Steps of a variant. (default: %(default)s)")
    parser.add_argument("--steps_of_others", type=int, default=25, help="Steps of llm.c and nanoGPT. (default: 25)")
    parser.add_argument("--rounds", type=int, default=10, help="Rounds of the part paired. (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="Processes of train.py. (default: the number of GPUs)")
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
        try:
            for part in ("prepare", *args.parts):
                bench.attempt(part, "failed", getattr(bench, part))
        except KeyboardInterrupt:
            print("interrupted")
        (args.out / "gpu.md").write_text(bench.tables(), encoding="utf-8")
        print(f"\n{bench.tables()}")


if __name__ == "__main__":
    main(sys.argv[1:])
