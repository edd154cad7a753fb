"""Tokenize text with datatrove on one machine or with Slurm, for more text than one machine can tokenize.

    pip install 'datatrove[io]'
    python cloud/datatrove_tokenize.py web tokens --tasks 64 --workers 16                     # this machine
    python cloud/datatrove_tokenize.py web tokens --tasks 64 --slurm PARTITION --time 8:00:00
    python prepare_data.py --data_files tokens --dataset_dir data/web

`web` has .jsonl files (also .gz or .zst). With Slurm, all machines need the same file system with `web`, `tokens` and
the .venv of this command. Start it on a login node: it submits an array of jobs and ends. If `tokens` has as many
.ds.index files as there are tasks, all are done. The same command again runs only those that are missing:
for other text, delete `tokens` and `tokens.logs` first.
Task N reads the files N, N + tasks, …: with a task per file, the documents keep the order of prepare_data.py.
"""

import argparse
import os
import sys
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader  # or ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer


class RowTokenizer(DocumentTokenizer):
    """Write the ids of prepare_data.py: the separator before each document, and never for text that spells it."""

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        # With Slurm, the jobs get this class without the imports of this file.
        from tokenizers.processors import TemplateProcessing

        separator = (self.eos_token, self.tokenizer.token_to_id(self.eos_token))
        self.tokenizer.post_processor = TemplateProcessing(single=f"{separator[0]} $A", special_tokens=[separator])
        self.tokenizer.encode_special_tokens = True
        return super().run(data, rank, world_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokenize text with datatrove.")
    parser.add_argument("text", help="Folder with .jsonl files.")
    parser.add_argument("tokens", help="Folder for the token files.")
    parser.add_argument("--tokenizer", default="openai-community/gpt2", help="Hub id, or file tokenizer.json.")
    parser.add_argument("--separator", default="<|endoftext|>", help="eos_token of the tokenizer.")
    parser.add_argument("--tasks", type=int, default=1, help="Number of token files.")
    parser.add_argument("--workers", type=int, default=-1, help="Tasks at the same time. -1: all.")
    parser.add_argument("--slurm", metavar="PARTITION", help="Submit jobs to this partition.")
    parser.add_argument("--time", default="24:00:00", help="With --slurm, the time limit of a task.")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each task uses one core
    writer = RowTokenizer(args.tokens, args.tokenizer, eos_token=args.separator, shuffle_documents=False)
    writer.batch_size = 1000  # 10,000 documents would need too much memory
    steps = [JsonlReader(args.text), writer]  # filters and deduplication stand between them
    places = {"logging_dir": args.tokens.rstrip("/") + ".logs", "workers": args.workers}
    if args.slurm is None:
        LocalPipelineExecutor(steps, args.tasks, **places).run()
    else:
        activate = str(Path(sys.prefix, "bin", "activate"))
        SlurmPipelineExecutor(steps, args.tasks, args.time, args.slurm, venv_path=activate, qos="", **places).run()
