"""Measure one contender of train_step.py.

    python benchmarks/contenders.py bare '{"shape": "shakespeare", "micro_batch": 12, …}'

The contender in this example is `bare`. A contender is a model with a training loop. Every contender trains the same
model shape on the same random token ids.
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_loop import Masters
from stopwatch import Stopwatch


sys.path.insert(0, str(Path(__file__).parents[1]))

SHAPES = {
    "124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "sequence_length": 1024, "vocab_size": 50_257},
    # nanoGPT's README, "I only have a macbook": the CPU command for Shakespeare by characters.
    "shakespeare": {"n_layer": 4, "n_head": 4, "n_embd": 128, "sequence_length": 64, "vocab_size": 65},
}
SEPARATOR = 0  # written to 1 in DOCUMENT random positions, as in text with documents of 700 tokens
DOCUMENT = 700


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
    tokens_per_chunk: int = 0  # of this project's loss; 0: its default
    profile: str = ""  # JSON file for a profile of the two steps after the windows; "": count their host syncs

    @property
    def model(self) -> dict[str, int]:
        return SHAPES[self.shape]

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps * self.windows + 2  # host syncs are counted in 2 more steps


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class RandomRows:
    """Rows of sequence_length + 1 random token ids, some of them separators."""

    def __init__(self, setup: Setup) -> None:
        count = setup.micro_batch * setup.accumulation * setup.total_steps
        shape = (count, setup.model["sequence_length"] + 1)
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


def our_model(setup: Setup, *, document_mask: bool = False) -> Any:
    from gpt2_repro.model.arguments import ModelArguments
    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import Documents

    shape = {key: setup.model[key] for key in ("n_layer", "n_head", "n_embd")}
    length, vocabulary = setup.model["sequence_length"], setup.model["vocab_size"]
    config = build_config(ModelArguments(**shape), sequence_length=length, vocab_size=vocabulary)
    machine = Machine(torch.cuda.is_available(), setup.bf16, length, document_mask=document_mask)
    attention = choose_attention("auto", machine, config, rows=setup.micro_batch).name
    documents = Documents(SEPARATOR) if document_mask else None
    return build_model(config, attention=attention, documents=documents, compiled=setup.compile)


def trainer(setup: Setup, watch: Stopwatch, *, document_mask: bool = False) -> None:
    """Measure the time of training steps with this project's Trainer.

    With `document_mask`, a token attends only to tokens of the same document.
    """
    from transformers import TrainerCallback

    from gpt2_repro.run_record import RunRecord
    from gpt2_repro.run_record.environment import Environment
    from gpt2_repro.training.arguments import load_recipe
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

    class Watched(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_ended()

    data = RandomRows(dataclasses.replace(setup, micro_batch=setup.micro_batch * processes))
    precision = "bf16" if setup.bf16 else "fp32"
    identity = {"max_steps": plan.max_steps, "extensions": []}
    request = {"request": {"packing": "concat"}}
    environment = Environment(precision=precision, plan=plan, data=request, run_identity=identity)
    training = PretrainingTrainer(
        model=our_model(setup, document_mask=document_mask),
        args=args,
        inputs=Inputs(train=data, validation={"": data}, tokenizer=None, hellaswag=None),
        run=RunRecord(args.output_dir),
        environment=environment,
    )
    add_callbacks(training)
    training.add_callback(Watched())
    training.train()


def loop(
    setup: Setup,
    watch: Stopwatch,
    model: Any,
    optimizer: Any,
    loss_of: Callable[..., torch.Tensor],
    masters: Masters | None = None,
) -> None:
    """Train with a plain PyTorch loop, under autocast if there are no `masters`."""
    autocast = torch.autocast(device(), torch.bfloat16, enabled=setup.bf16 and masters is None)
    updated = masters.masters if masters else list(model.parameters())
    batches = RandomRows(setup).batches(setup)
    for _ in range(setup.total_steps):
        for _ in range(setup.accumulation):
            batch = next(batches)
            with autocast:
                loss = loss_of(model, batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) / setup.accumulation
            loss.backward()
            if masters:
                masters.add_gradients()
        torch.nn.utils.clip_grad_norm_(updated, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            masters.round()
        watch.step_ended()


def bare(setup: Setup, watch: Stopwatch, *, bf16_weights: bool = False) -> None:
    """Measure the time of a plain PyTorch loop with this project's model and loss.

    With `bf16_weights`, a bf16 run has bf16 weights and fp32 masters, as under ZeRO-1.
    """
    model = our_model(setup).to(device()).train()
    masters = Masters(model) if bf16_weights and setup.bf16 else None
    updated = masters.masters if masters else list(model.parameters())
    groups = [
        {"params": [p for p in updated if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in updated if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    loop(setup, watch, model, optimizer, lambda model, x, y: model(input_ids=x, shift_labels=y).loss, masters)


def nanogpt(setup: Setup, watch: Stopwatch) -> None:
    """Measure the time of training steps with the model and optimizer of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(setup.nanogpt, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    shape = {key: setup.model[key] for key in ("n_layer", "n_head", "n_embd")}
    vocabulary = 50_304 if setup.model["vocab_size"] == 50_257 else setup.model["vocab_size"]
    # With biases, like GPT-2.
    config = module.GPTConfig(
        **shape, block_size=setup.model["sequence_length"], vocab_size=vocabulary, dropout=0.0, bias=True
    )
    torch.set_float32_matmul_precision("high")  # nanoGPT's train.py allows TF32
    model = module.GPT(config).to(device())
    for layer in model.modules():
        if isinstance(layer, torch.nn.GELU):
            layer.approximate = "tanh"  # GPT-2's form, so that all contenders compute the same function
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device())
    model = torch.compile(model) if setup.compile else model
    loop(setup, watch, model, optimizer, lambda model, x, y: model(x, y)[1])


def stock(setup: Setup, watch: Stopwatch) -> None:
    """Measure the time of training steps with transformers' own GPT-2 and Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    shape = {key: setup.model[key] for key in ("n_layer", "n_head", "n_embd")}
    length, vocabulary = setup.model["sequence_length"], setup.model["vocab_size"]
    special = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    model = GPT2LMHeadModel(GPT2Config(**shape, n_positions=length, vocab_size=vocabulary, **special))

    class Columns(RandomRows):  # the columns of run_clm.py
        def __getitem__(self, index: Any) -> dict[str, Any]:
            ids = self.rows[index, :-1].tolist()
            return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    class Watched(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_ended()

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
    Trainer(model=model, args=args, train_dataset=Columns(setup), callbacks=[Watched()]).train()


def main(name: str, described: str) -> None:
    """Run a contender with a `Setup` in JSON, and print the measurements as JSON."""
    logging.disable(logging.INFO)
    setup = Setup(**json.loads(described))
    counts = {"warmup": setup.warmup, "steps": setup.steps, "windows": setup.windows, "total": setup.total_steps}
    watch = Stopwatch(**counts, eager=not setup.compile, profile=setup.profile)
    if setup.tokens_per_chunk:
        from gpt2_repro.model import pretraining

        pretraining.chunk_size = lambda weight: setup.tokens_per_chunk
    others: dict[str, Callable[[Setup, Stopwatch], None]] = {
        "bare": bare,
        "bare_bf16": functools.partial(bare, bf16_weights=True),
        "nanogpt": nanogpt,
        "stock": stock,
        "masked": functools.partial(trainer, document_mask=True),
    }
    others.get(name, trainer)(setup, watch)
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if os.environ.get("RANK", "0") == "0":
        result = {"seconds": watch.seconds, "median": statistics.median(watch.seconds), "waits": watch.waits}
        print(
            json.dumps(result | {"peak_bytes": peak, "processes": int(os.environ.get("WORLD_SIZE", "1"))}), flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
