"""Compare the speed and memory of this project with those of other training loops.

    python benchmarks/train_step.py                              # on a GPU: 124M, 64 rows of 1024 tokens
    python benchmarks/train_step.py --shape shakespeare          # nanoGPT's CPU configuration
    python benchmarks/train_step.py --nanogpt ~/nanoGPT          # also nanoGPT's model and loop
    python benchmarks/train_step.py --only trainer bare zero1 bare_bf16 --processes 2

The contenders are this project and training loops that a user could use instead. Every contender trains the same model
shape on the same random token ids, on a GPU if there is one, in a fresh process. Odd rounds run the contenders in
order, even rounds in reverse order, so that a slow minute of a shared machine affects all of them. Only numbers of the
same run of this script can be compared. The contenders do not import datasets, deepspeed or lm_eval, except for
`zero1`, which uses DeepSpeed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bare_loop import Masters, loop
from benchmarks.machine import describe
from benchmarks.processes import run_captured
from benchmarks.stopwatch import Stopwatch


SHAPES = {
    "124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "sequence_length": 1024, "vocab_size": 50_257},
    # nanoGPT's README, "I only have a macbook": the CPU command for Shakespeare by characters.
    "shakespeare": {"n_layer": 4, "n_head": 4, "n_embd": 128, "sequence_length": 64, "vocab_size": 65},
}
SEPARATOR = 0  # written to 1 in DOCUMENT random positions, as in text with documents of 700 tokens
DOCUMENT = 700
NAMES = {
    "trainer": "this project, one process",
    "masked": "this project, attention inside documents",
    "ddp": "this project under DDP",
    "zero1": "this project under DeepSpeed ZeRO-1",
    "bare": "PyTorch loop, this project's model and loss",
    "bare_bf16": "the same loop with bf16 weights and fp32 masters",
    "nanogpt": "nanoGPT's model and loop",
    "stock": "stock GPT2Config() and Trainer",
}
# In bf16, these contenders have bf16 weights and fp32 masters. The others have fp32 weights and use autocast.
BF16_WEIGHTS = ("zero1", "bare_bf16")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Model shape, batch and number of steps of a measurement.

    After `warmup` optimizer steps, `windows` windows of `steps` optimizer steps are timed.
    """

    shape: str
    micro_batch: int
    accumulation: int
    warmup: int
    steps: int
    windows: int
    compile: bool
    bf16: bool
    nanogpt: str = ""
    profile: str = ""  # JSON file for a profile of the two steps after the windows; "": count their host syncs

    @property
    def model(self) -> dict[str, int]:
        return SHAPES[self.shape]

    @property
    def sizes(self) -> dict[str, int]:
        return {key: self.model[key] for key in ("n_layer", "n_head", "n_embd")}

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps * self.windows + 2  # host syncs are counted in 2 more steps


class RandomRows:
    """Rows of sequence_length + 1 random token ids, some of them separators."""

    def __init__(self, setup: Setup) -> None:
        shape = (setup.micro_batch * setup.accumulation * setup.total_steps, setup.model["sequence_length"] + 1)
        source = np.random.default_rng(0)  # the same rows for every contender
        self.rows = source.integers(0, setup.model["vocab_size"], shape, dtype=np.int64)
        self.rows[source.random(shape) < 1 / DOCUMENT] = SEPARATOR

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}

    def batches(self, setup: Setup) -> Iterator[torch.Tensor]:
        """Yield micro-batches in order as tensors of shape [rows, T + 1] on the device."""
        for start in range(0, len(self.rows), setup.micro_batch):
            yield torch.from_numpy(self.rows[start : start + setup.micro_batch]).to(device(), non_blocking=True)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def watched(watch: Stopwatch) -> Any:
    """Return a callback for Trainer that measures the steps."""
    from transformers import TrainerCallback

    class Watched(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_ended()

    return Watched()


def our_model(setup: Setup, *, document_mask: bool = False) -> Any:
    from gpt2_repro.model.arguments import ModelArguments
    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import Documents

    length, vocabulary = setup.model["sequence_length"], setup.model["vocab_size"]
    config = build_config(ModelArguments(**setup.sizes), sequence_length=length, vocab_size=vocabulary)
    machine = Machine(torch.cuda.is_available(), setup.bf16, length, document_mask=document_mask)
    attention = choose_attention("auto", machine, config, rows=setup.micro_batch).name
    documents = Documents(SEPARATOR) if document_mask else None
    return build_model(config, attention=attention, documents=documents, compiled=setup.compile)


def trainer(setup: Setup, watch: Stopwatch, *, document_mask: bool = False) -> None:
    """Measure the time of training steps with this project's Trainer.

    With `document_mask`, a token attends only to tokens of the same document.
    """
    from transformers import PreTrainedTokenizerFast

    from gpt2_repro.data.tokenizer import number_tokenizer
    from gpt2_repro.planning.recipe import load_recipe
    from gpt2_repro.run_record import RunRecord
    from gpt2_repro.run_record.environment import Environment
    from gpt2_repro.training.inputs import Inputs
    from gpt2_repro.training.run import add_callbacks
    from gpt2_repro.training.settings import resolve_settings, to_training_arguments
    from gpt2_repro.training.trainer import PretrainingTrainer

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = setup.micro_batch * setup.accumulation * processes
    options = {
        "sequence_length": setup.model["sequence_length"],
        "tokens_per_step": rows * setup.model["sequence_length"],
        "per_device_train_batch_size": setup.micro_batch,
        "max_steps": setup.total_steps,
        "warmup_steps": setup.total_steps - 1,
        "bf16": setup.bf16,
        "use_cpu": not torch.cuda.is_available(),
        "torch_compile": setup.compile,
        "eval_strategy": "no",
        "save_strategy": "no",
        "sample_tokens": 0,
        "disable_tqdm": True,
        "output_dir": tempfile.mkdtemp(),
        "dataloader_num_workers": 2 if torch.cuda.is_available() else 0,
    }
    recipe = load_recipe([word for key, value in options.items() for word in (f"--{key}", str(value))])
    settings, plan = resolve_settings(recipe)
    args = to_training_arguments(settings, plan)
    data = RandomRows(dataclasses.replace(setup, micro_batch=setup.micro_batch * processes))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=number_tokenizer(setup.model["vocab_size"]))
    identity = {"max_steps": plan.max_steps, "extensions": []}
    request, precision = {"request": {"packing": "concat"}}, "bf16" if setup.bf16 else "fp32"
    training = PretrainingTrainer(
        model=our_model(setup, document_mask=document_mask),
        args=args,
        inputs=Inputs(train=data, validation={"": data}, tokenizer=tokenizer, hellaswag=None),
        run=RunRecord(args.output_dir),
        environment=Environment(precision=precision, plan=plan, data=request, run_identity=identity),
    )
    add_callbacks(training)
    training.add_callback(watched(watch))
    training.train()


def bare(setup: Setup, watch: Stopwatch, *, bf16_weights: bool = False) -> None:
    """Measure the time of a plain PyTorch loop with this project's model and loss.

    With `bf16_weights`, a bf16 run has bf16 weights and fp32 masters, as under ZeRO-1.
    """
    model = our_model(setup).to(device()).train()
    masters = Masters(model) if bf16_weights and setup.bf16 else None
    train(setup, watch, model, lambda model, x, y: model(input_ids=x, shift_labels=y).loss, masters=masters)


def nanogpt(setup: Setup, watch: Stopwatch) -> None:
    """Measure the time of training steps with the model and optimizer of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(setup.nanogpt, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    vocabulary = 50_304 if setup.model["vocab_size"] == 50_257 else setup.model["vocab_size"]
    shape = {**setup.sizes, "block_size": setup.model["sequence_length"], "vocab_size": vocabulary}
    torch.set_float32_matmul_precision("high")  # nanoGPT's train.py allows TF32
    model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True)).to(device())  # with biases, like GPT-2
    for layer in model.modules():
        if isinstance(layer, torch.nn.GELU):
            layer.approximate = "tanh"  # GPT-2's form, so that all contenders compute the same function
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device())
    model = torch.compile(model) if setup.compile else model
    train(setup, watch, model, lambda model, x, y: model(x, y)[1], optimizer=optimizer)


def train(setup: Setup, watch: Stopwatch, model: Any, loss_of: Callable[..., torch.Tensor], **options: Any) -> None:
    """Train with the plain PyTorch loop."""

    def mean(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) / setup.accumulation

    layout = {"steps": setup.total_steps, "passes": setup.accumulation, "bf16": setup.bf16}
    for _ in loop(model, RandomRows(setup).batches(setup), mean, **layout, **options):
        watch.step_ended()


def stock(setup: Setup, watch: Stopwatch) -> None:
    """Measure the time of training steps with transformers' own GPT-2 and Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    length, vocabulary = setup.model["sequence_length"], setup.model["vocab_size"]
    special = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    model = GPT2LMHeadModel(GPT2Config(**setup.sizes, n_positions=length, vocab_size=vocabulary, **special))

    class Columns(RandomRows):  # the columns of run_clm.py
        def __getitem__(self, index: Any) -> dict[str, Any]:
            ids = self.rows[index, :-1].tolist()
            return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=setup.micro_batch,
        gradient_accumulation_steps=setup.accumulation,
        max_steps=setup.total_steps,
        bf16=setup.bf16,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=Columns(setup), callbacks=[watched(watch)]).train()


CONTENDERS: dict[str, Callable[[Setup, Stopwatch], None]] = {
    **dict.fromkeys(("trainer", "ddp", "zero1"), trainer),
    "masked": functools.partial(trainer, document_mask=True),
    "bare": bare,
    "bare_bf16": functools.partial(bare, bf16_weights=True),
    "nanogpt": nanogpt,
    "stock": stock,
}


def measure(name: str, setup: Setup) -> None:
    """Run a contender in this process, and print the measurements as JSON."""
    logging.disable(logging.INFO)
    watch = Stopwatch(setup)
    CONTENDERS[name](setup, watch)
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if os.environ.get("RANK", "0") == "0":
        result = {"seconds": watch.seconds, "median": statistics.median(watch.seconds), "waits": watch.waits}
        result |= {"peak_bytes": peak, "processes": int(os.environ.get("WORLD_SIZE", "1"))}
        print(json.dumps(result), flush=True)


def run(name: str, setup: Setup, *, processes: int, timeout: float) -> dict[str, Any]:
    """Run one contender in a separate process and return its measurements.

    If the contender fails or needs more than `timeout` seconds, the result is {"error": …}.
    """
    python = [sys.executable]
    if name == "ddp":
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    elif name == "zero1":
        config = ["--config_file", "accelerate_configs/zero1.yaml", "--num_processes", str(processes)]
        python += ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
    command = [*python, "benchmarks/train_step.py", name, json.dumps(dataclasses.asdict(setup))]
    try:
        done = run_captured(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished within {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = [line for line in done.stderr.splitlines() if "Error" in line] or ["failed"]
        return {"error": last[-1][:200], "stderr": done.stderr[-4000:]}
    return json.loads(lines[-1])


def table(setup: Setup, results: dict[str, list[dict[str, Any]]]) -> str:
    """Return Markdown text with the machine, setup and a table of measurements."""
    from gpt2_repro.hardware import find_accelerator, peak_flops
    from gpt2_repro.model.size import flops_per_token, gpt2_parameters

    size, length = {key: setup.model[key] for key in ("n_layer", "n_embd")}, setup.model["sequence_length"]
    parameters = gpt2_parameters(**size, n_positions=length, vocab_size=setup.model["vocab_size"])
    flops = flops_per_token(parameters=parameters - length * size["n_embd"], **size, sequence_length=length)
    peak = peak_flops(find_accelerator().name) if setup.bf16 else None
    lines = [
        f"{describe('torch', 'transformers', 'accelerate', 'deepspeed')}, {torch.get_num_threads()} threads",
        f"{setup.shape}: {setup.micro_batch} x {length} tokens x {setup.accumulation} passes per process and step, "
        f"{'bf16' if setup.bf16 else 'fp32'}, {'compiled' if setup.compile else 'eager'}; "
        f"{flops / 1e6:,.0f} M FLOPs per token (6N + 12LCT)",
        f"`python {' '.join(sys.argv)}`",
        "",
        "Relative speed: compared with the first contender that has the same dtype of weights",
        "",
        "| contender | weights | ms per step (min to max) | tokens/s | relative speed "
        "| MFU | peak memory | host syncs in 2 steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[str, float] = {}
    for name, rounds in results.items():
        good = [measured for measured in rounds if "error" not in measured]
        if not good:
            lines.append(f"| {NAMES[name]} | {rounds[0]['error'].replace('|', ' ')} | | | | | | |")
            continue
        seconds = [second for measured in good for second in measured["seconds"]]
        median, processes = statistics.median(seconds), good[0]["processes"]
        speed = setup.micro_batch * setup.accumulation * length * processes / median
        weights = "fp32" if not setup.bf16 else "bf16" if name in BF16_WEIGHTS else "fp32, autocast"
        cells = [
            weights,
            f"{median * 1e3:.1f} ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})",
            f"{speed:,.0f}",
        ]
        cells.append(f"{speed / first.setdefault(weights, speed):.3f}")
        cells.append(f"{speed * flops / (peak * processes):.1%}" if peak else "-")
        cells.append(f"{max(measured['peak_bytes'] for measured in good) / 1e9:.1f} GB")
        cells.append("-" if good[0]["waits"] is None else str(good[0]["waits"]))
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the contenders, print a Markdown table, and write all numbers to --out."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="124m" if gpu else "shakespeare")
    parser.add_argument("--micro_batch", type=int, help="Rows per micro-batch. (124m: 64, shakespeare: 12)")
    parser.add_argument("--accumulation", type=int, default=1, help="Micro-batches per step.")
    parser.add_argument("--warmup", type=int, default=5, help="Steps before the first window.")
    parser.add_argument("--steps", type=int, default=10 if gpu else 50, help="Steps per window.")
    parser.add_argument("--windows", type=int, default=3, help="Windows per round.")
    parser.add_argument("--rounds", type=int, default=1 if gpu else 2, help="Repetitions per contender.")
    parser.add_argument("--processes", type=int, default=max(1, torch.cuda.device_count()), help="For ddp and zero1.")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu, help="Use torch.compile.")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=gpu, help="Use bf16, not fp32.")
    parser.add_argument("--nanogpt", default="", help="Folder of a nanoGPT checkout.")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="Run only these contenders.")
    parser.add_argument("--out", type=Path, help="JSON file for all measurements.")
    args = parser.parse_args()
    deepspeed = ["zero1", "bare_bf16"][: 1 + args.bf16] if importlib.util.find_spec("deepspeed") else []
    names = args.only or ["trainer", "bare", *deepspeed, *["nanogpt"] * bool(args.nanogpt), "stock"]
    if "nanogpt" in names and not Path(args.nanogpt, "model.py").is_file():
        parser.error("nanogpt needs a checkout with model.py. Pass --nanogpt PATH.")
    taken = {field.name: getattr(args, field.name) for field in dataclasses.fields(Setup) if hasattr(args, field.name)}
    setup = Setup(**taken | {"micro_batch": args.micro_batch or {"124m": 64, "shakespeare": 12}[args.shape]})

    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            measured = run(name, setup, processes=args.processes, timeout=300)
            print(f"round {turn + 1} {name}: {measured.get('error') or measured['seconds']}", file=sys.stderr)
            results[name].append(measured)
            if args.out:
                everything = {"setup": dataclasses.asdict(setup), "results": results}
                args.out.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    print(table(setup, results))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CONTENDERS:
        measure(sys.argv[1], Setup(**json.loads(sys.argv[2])))
    else:
        main()
