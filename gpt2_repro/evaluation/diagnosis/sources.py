"""The texts of LAMBADA and wikitext, from local files or from the Hub, as lm-evaluation-harness shows them to a model."""

from pathlib import Path

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.documents import read_documents


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
    if source is not None:
        texts = read_documents(source, column)
    else:
        from datasets import load_dataset

        try:
            texts = list(load_dataset(path, configuration, split=split)[column])
        except (OSError, ValueError) as error:
            raise UserError(f"{task} cannot be had from {path}: {' '.join(str(error).split())[:200]}") from None
    return texts if task == "lambada_openai" else [wikitext_detokenizer({column: text}) for text in texts]
