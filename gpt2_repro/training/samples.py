"""Sample text during training, print it, and log it to samples.jsonl and wandb."""

from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback

from gpt2_repro.run_record import RunRecord, events
from gpt2_repro.tokenization import start_ids
from gpt2_repro.training.sharded import has_shards


SHOWN = 200  # characters of a sample shown in the terminal


class TextSampler(TrainerCallback):
    """Samples text after a validation, and appends the text to samples.jsonl.

    Args:
        run: the run directory.
        due: a function that takes a step, and returns whether text is sampled after the validation at this step.
        report: a function that sends the text to the tracking services.
    """

    def __init__(
        self, run: RunRecord, tokenizer: Any, *, due: Callable[[int], bool], report: Callable[[str], None]
    ) -> None:
        self.run, self.tokenizer, self.due, self.report = run, tokenizer, due, report

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        sharded = has_shards(model)
        if not self.due(state.global_step) or not (state.is_world_process_zero or sharded):
            return
        text = self._sample(args, state.global_step, model, together=sharded)
        if not state.is_world_process_zero:
            return
        events.append(self.run.samples, {"step": state.global_step, "prompt": args.sample_prompt, "text": text})
        tqdm.write(f"sample: {_on_one_line(text)}")
        self.report(text)

    def _sample(self, args: Any, step: int, model: Any, *, together: bool) -> str:
        window = model.config.max_position_embeddings
        ids = torch.tensor([start_ids(self.tokenizer, args.sample_prompt, window=window)], device=args.device)
        # By default fork_rng saves the state of every visible GPU, which creates a CUDA context on each.
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(args.seed + step)
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(args.sample_tokens, window - ids.shape[1]),
                do_sample=True,
                top_k=50,
                pad_token_id=self.tokenizer.eos_token_id,
                logits_processor=LogitsProcessorList([_RequireFinite()]),
                synced_gpus=together,
            )
        return self.tokenizer.decode(written[0], skip_special_tokens=True)


class _RequireFinite(LogitsProcessor):
    """A logits processor that raises FloatingPointError if logits are not finite."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # On a GPU, sampling from such logits causes a device assertion. Then the process cannot use CUDA any more.
        if not bool(scores.isfinite().all()):
            raise FloatingPointError("The logits are not finite.")
        return scores


def _on_one_line(text: str) -> str:
    """Join the lines of a text, and cut the result after `SHOWN` characters.

    Terminal control characters are replaced.
    """
    line = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in " ".join(text.split()))
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
