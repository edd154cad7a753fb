"""Load models and tokenizers for export, evaluation and text generation.

Files of unknown authors are safe to load: remote code is never run, and the only pickles that are loaded, those of
nanoGPT, go through torch's restricted unpickler.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import read_object
from gpt2_repro.hub import hub_reason
from gpt2_repro.model.configuration import FAILURES, SAFELY
from gpt2_repro.model.llmc import read_llmc
from gpt2_repro.model.nanogpt import open_nanogpt, read_nanogpt
from gpt2_repro.model.pretraining import plain_config, plain_model
from gpt2_repro.model.size import experts_of
from gpt2_repro.run_record.layout import AVERAGE_VARIANT, AVERAGED_WEIGHTS
from gpt2_repro.tokenization import load


# Constants that transformers below 4.30 saved with the weights of GPT-2, GPT-Neo, GPT-J, CodeGen and OPT. Version 5.23
# ignores only some of them. These modules have no weights with these names.
CONSTANTS = re.compile(
    r"(^|\.)h\.\d+\.(attn|attn\.attention|crossattention)\.(bias|masked_bias|causal_mask|embed_positions)$"
    r"|(^|\.)decoder\.version$"
)
COMPLETE = "Pass a run, a folder or a Hub id with a complete model."


def load_config(checkpoint: str) -> PreTrainedConfig:
    """Return the configuration of a checkpoint that `load_model` accepts."""
    file = Path(checkpoint)
    if file.is_file() and file.suffix == ".bin":
        return read_llmc(file).config
    if file.is_file():
        config, _ = open_nanogpt(file)
        return config
    return AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)


def load_model(checkpoint: str) -> PreTrainedModel:
    """Return the fp32 model of a folder or Hub id, without vocabulary padding.

    A checkpoint of a run with --ema_steps has two files of weights. Its average is loaded, as final/ is an average.
    `checkpoint` may also be a file of llm.c (.bin) or nanoGPT (.pt).

    Raises UserError if the model is quantized, cannot be loaded from safetensors, or has weights that are not finite.
    """
    file = Path(checkpoint)
    if file.is_file() and file.suffix == ".bin":
        return read_llmc(file)
    if file.is_file():
        return read_nanogpt(file)
    verbosity = logging.get_verbosity()
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{checkpoint} is quantized. Pass a checkpoint with fp32, bf16 or fp16 weights.")
        # config.json may name a kernel of an unknown author, which transformers would download.
        config._attn_implementation = None  # also in nested configurations; transformers chooses SDPA or eager
        if Path(checkpoint).is_dir():
            _check_files(Path(checkpoint))
        logging.set_verbosity_error()  # hides a table of weights that do not fit config.json
        variant = None
        if Path(checkpoint, AVERAGED_WEIGHTS).is_file():
            variant = AVERAGE_VARIANT
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, variant=variant, output_loading_info=True, **SAFELY
        )
    except (OSError, SafetensorError, *FAILURES) as error:
        raise UserError(f"Cannot load {checkpoint} ({_reason(checkpoint, error)}). {COMPLETE}") from None
    finally:
        logging.set_verbosity(verbosity)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(key for key in loading[problem] if not CONSTANTS.search(str(key)))
        if keys:
            details = f"{problem.replace('_', ' ')} {keys[:3]} ({len(keys)} in all)"
            raise UserError(f"Cannot load {checkpoint}, because its weights do not fit its config.json: {details}.")
    for name, weight in model.named_parameters():
        is_finite = bool(weight.isfinite().all())
        if not is_finite:
            raise UserError(f"{checkpoint} has weights that are not finite ({name}).")
    if hasattr(config, "true_vocab_size"):
        return plain_model(config, model.state_dict())
    return model.eval()


def _reason(checkpoint: str, error: Exception) -> str:
    if Path(checkpoint).exists():
        return in_a_line(error)
    return hub_reason(error)


def load_experts(model: PreTrainedModel, checkpoint: str) -> bool:
    """Load a checkpoint into `model` if it is a mixture of experts. Return whether."""
    experts, _ = experts_of(model.config)
    if not experts:
        return False
    # Trainer (5.23) would skip the experts without an error, because their names differ in checkpoint and model.
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, **SAFELY)
    model.load_state_dict(stock.state_dict())
    return True


def _check_files(folder: Path) -> None:
    """Raise UserError for a file outside of `folder`."""
    tensors = read_object(folder / "model.safetensors.index.json").get("weight_map", {})
    for name in tensors.values():
        if Path(str(name)).name != str(name):
            raise UserError(f"The weight index of {folder} names a file outside of this folder: {name}.")


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hub id, or raise UserError."""
    folder = Path(checkpoint)
    files = [*folder.glob("*token*"), *folder.glob("vocab*")]
    if folder.is_file() or (folder.is_dir() and not files):
        raise UserError(f"{checkpoint} has no tokenizer files.")
    try:
        return load(checkpoint)
    except Exception as error:  # `tokenizers` raises no subclass for a damaged tokenizer.json
        raise UserError(f"Cannot load the tokenizer of {checkpoint} ({_reason(checkpoint, error)}).") from None


def load_pair(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a folder or Hub id, or raise UserError."""
    return load_model(checkpoint), load_tokenizer(checkpoint)


def untrained_like(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Return a model of the same architecture with new random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        untrained = AutoModelForCausalLM.from_config(plain_config(model.config), dtype=torch.float32)
    return untrained.eval()
