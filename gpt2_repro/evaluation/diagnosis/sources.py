"""The texts of LAMBADA and wikitext, from local files or from the Hub, as lm-evaluation-harness shows them to a model."""

import json
from pathlib import Path

from gpt2_repro.errors import UserError


# Hub id, configuration, split and column of the harness's tasks (lm-eval 0.4.13).
DATA = {
    "lambada_openai": ("EleutherAI/lambada_openai", "default", "test", "text"),
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", "page"),
}


def read_texts(task: str, source: Path | None) -> list[str]:
    """The passages or pages of a task: of the jsonl file `source`, or of the Hub.

    Raises UserError where they cannot be read.
    """
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    path, configuration, split, column = DATA[task]
    try:
        if source is None:
            from datasets import load_dataset

            rows = list(load_dataset(path, configuration, split=split))
        else:
            rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        return [row[column] if task == "lambada_openai" else wikitext_detokenizer(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the texts of {task} cannot be read from {source or path}: {reason}") from None
