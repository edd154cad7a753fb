"""Sample text during training, print it, and log it to samples.jsonl."""

from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessorList, TrainerCallback

from gpt2_repro.run_record import events
from gpt2_repro.text import in_terminal
from gpt2_repro.tokenization import start_ids
from gpt2_repro.training.sharded import has_shards
from gpt2_repro.training.trainer import PretrainingTrainer


SHOWN = 200  # characters of a sample shown in the terminal
EMPTY = "(no text: the model ended the document, or wrote white space only)"


class TextSampler(TrainerCallback):
    """Samples text after a validation, prints it and writes it to samples.jsonl."""

    def __init__(self, trainer: PretrainingTrainer) -> None:
        self.trainer = trainer
        self.tokenizer = trainer.processing_class

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        settings = args.settings
        is_due = self.trainer.when.is_due(state.global_step, settings.sample_steps)
        if not settings.sample_tokens or not is_due:
            return
        sharded = has_shards(model)
        if not sharded and not state.is_world_process_zero:
            return
        text = self._sample(args, state.global_step, model, together=sharded)
        if not state.is_world_process_zero:
            return
        sample = {"step": state.global_step, "prompt": settings.sample_prompt, "text": text}
        events.append(self.trainer.run.samples, sample)
        tqdm.write(f"sample: {in_terminal(text, SHOWN) or EMPTY}")

    def _sample(self, args: Any, step: int, model: Any, *, together: bool) -> str:
        window = model.config.max_position_embeddings
        prompt = start_ids(self.tokenizer, args.settings.sample_prompt, window=window)
        ids = torch.tensor([prompt], device=args.device)
        # By default fork_rng saves the state of every visible GPU, which creates a CUDA context on each.
        devices: list[torch.device] = []
        if args.device.type == "cuda":
            devices.append(args.device)
        room = window - len(prompt)
        max_new_tokens = min(args.settings.sample_tokens, room)
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(args.seed + step)
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=True,
                top_k=50,
                pad_token_id=self.tokenizer.eos_token_id,
                logits_processor=LogitsProcessorList([_require_finite]),
                synced_gpus=together,
            )
        return self.tokenizer.decode(written[0], skip_special_tokens=True)


def _require_finite(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the logits `scores`, or raise FloatingPointError if they are not finite."""
    # On a GPU, sampling from such logits causes a device assertion. Then the process cannot use CUDA any more.
    is_finite = bool(scores.isfinite().all())
    if not is_finite:
        raise FloatingPointError("The logits are not finite.")
    return scores
