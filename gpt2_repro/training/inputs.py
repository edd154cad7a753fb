"""Everything that a run reads, opened and checked before anything is built."""

import dataclasses
import logging

from transformers import PreTrainedTokenizerBase

from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import Rows
from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.hellaswag import HellaSwag, read_items
from gpt2_repro.model.export import start_ids
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.ranks import Ranks


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run learns from and what it is measured on.

    Args:
        validation: sets of rows by name, the main one as "".
        hellaswag: None where it is never scored.
    """

    train: Rows
    validation: dict[str, Rows]
    tokenizer: PreTrainedTokenizerBase
    hellaswag: HellaSwag | None


def open_inputs(data: PreparedData, args: PretrainingArguments) -> Inputs:
    """Open the prepared folder, and HellaSwag where it is to be scored.

    Raises UserError for a folder that does not fit, a prompt that cannot start a sample, and HellaSwag that is none.
    """
    length, tokenizer = data.manifest.form.sequence_length, data.tokenizer
    data.lock()
    train, validation = data.rows("train"), data.validation(eval_tokens=args.eval_tokens)
    if args.sample_steps and args.sample_tokens:
        start_ids(tokenizer, args.sample_prompt, window=length)
    return Inputs(train, validation, tokenizer, _open_hellaswag(args, tokenizer, window=length))


def _open_hellaswag(
    args: PretrainingArguments, tokenizer: PreTrainedTokenizerBase, *, window: int
) -> HellaSwag | None:
    """HellaSwag, or None where it is not asked for or the Hub is out of reach: a training needs no network."""
    if not args.hellaswag_steps:
        return None
    if args.eval_strategy == "no":
        logger.warning("HellaSwag is scored with validations: --eval_strategy no leaves it out")
        return None
    items = []
    try:
        items = read_items(args.hellaswag_data)
    except RunFailed as error:
        logger.warning("HellaSwag is not scored: %s", error)
    # All ranks score it or none does.
    return None if Ranks().largest(int(not items)) else HellaSwag(items, tokenizer, window=window)
