"""Train GPT-2 from scratch with transformers' Trainer, as common guides do.

    accelerate launch benchmarks/plain_trainer.py --text prose.txt --tokenizer openai-community/gpt2 --output_dir out \\
        --max_steps 1000 --learning_rate 6e-4 --bf16

The script follows run_clm.py and the blog post that recipes/blog_wrap512.yaml reproduces.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclasses.dataclass
class ScriptArguments:
    text: str
    tokenizer: str = "openai-community/gpt2"
    context: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    dtype: str = "bfloat16"


def tokenize(text: str, tokenizer, context: int) -> Dataset:
    """Tokenize the text, join the ids and cut them into blocks of `context` ids."""
    ids = tokenizer(text.split("\n\n"))["input_ids"]
    # Without a separator between documents, and in blocks as by group_texts of run_clm.py.
    joined = np.concatenate([np.asarray(document, dtype=np.int64) for document in ids if document])
    whole = len(joined) // context * context
    return Dataset.from_dict({"input_ids": joined[:whole].reshape(-1, context).tolist()})


def main() -> None:
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    text = Path(args.text).read_text(encoding="utf-8")
    held_out = int(0.95 * len(text))
    train_set = tokenize(text[:held_out], tokenizer, args.context)
    eval_set = tokenize(text[held_out:], tokenizer, args.context)

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=args.context,
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # The weights are kept in bf16 for flash attention.
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )

    checkpoint = get_last_checkpoint(training_args.output_dir) if Path(training_args.output_dir).is_dir() else None
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    tokenizer.save_pretrained(training_args.output_dir)
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
