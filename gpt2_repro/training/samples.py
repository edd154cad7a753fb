"""Text that the model writes after each validation, in samples.jsonl."""

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback

from gpt2_repro.model.export import start_ids
from gpt2_repro.training.run_directory import RunDirectory


logger = logging.getLogger(__name__)


class TextSampler(TrainerCallback):
    """Samples on rank 0 from the raw model, without moving the random state of the training."""

    def __init__(self, run: RunDirectory, tokenizer: PreTrainedTokenizerBase) -> None:
        self.run = run
        self.tokenizer = tokenizer

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not args.sample_tokens:
            return
        window = model.config.max_position_embeddings
        ids = torch.tensor([start_ids(self.tokenizer, args.sample_prompt, window=window)], device=args.device)
        # By default fork_rng saves the state of every visible GPU, and so opens a context on each.
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.inference_mode():
            torch.manual_seed(args.seed + state.global_step)
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(args.sample_tokens, window - ids.shape[1]),
                do_sample=True,
                top_k=50,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        text = self.tokenizer.decode(written[0], skip_special_tokens=True)
        self.run.append("samples.jsonl", {"step": state.global_step, "prompt": args.sample_prompt, "text": text})
