"""Train GPT-2 from scratch with transformers' Trainer, as common guides do.

    accelerate launch benchmarks/plain_trainer.py --text prose.txt --tokenizer openai-community/gpt2 --output_dir out

The script follows run_clm.py and the blog post that recipes/blog_wrap512.yaml reproduces.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", default="openai-community/gpt2")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--n_layer", type=int, default=12)
    parser.add_argument("--n_head", type=int, default=12)
    parser.add_argument("--n_embd", type=int, default=768)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--save_steps", type=int, default=500)
    parser.add_argument("--eval_steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--use_cpu", action="store_true")
    return parser.parse_args()


def tokenize(text: str, tokenizer, context: int) -> Dataset:
    """Tokenize the text, join the ids and cut them into blocks of `context` ids."""
    ids = tokenizer(text.split("\n\n"))["input_ids"]
    # Without a separator between documents, and in blocks as by group_texts of run_clm.py.
    joined = np.concatenate([np.asarray(document, dtype=np.int64) for document in ids if document])
    whole = len(joined) // context * context
    return Dataset.from_dict({"input_ids": joined[:whole].reshape(-1, context).tolist()})


def main() -> None:
    args = parse()
    set_seed(args.seed)

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
    print(f"{model.num_parameters() / 1e6:.1f}M parameters, {len(train_set)} rows of {args.context} tokens")

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup_steps,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=args.dtype == "bfloat16" and not args.use_cpu,
        use_cpu=args.use_cpu,
        logging_steps=10,
        eval_strategy="steps" if args.eval_steps else "no",
        eval_steps=args.eval_steps or None,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        save_total_limit=2,
        dataloader_num_workers=2,
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )

    checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    tokenizer.save_pretrained(args.output_dir)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
