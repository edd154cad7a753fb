"""Load models and tokenizers safely, even if their author is unknown.

Weights are loaded in fp32 and only from safetensors. Pickles are never loaded, and remote code is never run.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import read_object
from gpt2_repro.hub import hub_reason
from gpt2_repro.model.configuration import FAILURES, SAFELY
from gpt2_repro.model.pretraining import plain_config, plain_model


COMPLETE = "Pass a run, a folder or a Hub id with a complete model."


def load_model(checkpoint: str) -> PreTrainedModel:
    """Return the fp32 model of a folder or Hub id, in evaluation mode.

    Padding of the vocabulary is removed. The attention implementation in config.json is ignored, because it may name a
    kernel of an unknown author, which transformers would download.

    Raises UserError if the model cannot be fetched, is quantized or has no safetensors files. Also raises UserError if
    the weights do not match the configuration or are not finite.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{checkpoint} is quantized. Pass a checkpoint with fp32, bf16 or fp16 weights.")
        config._attn_implementation = None  # also in nested configurations; transformers chooses SDPA or eager
        if Path(checkpoint).is_dir():
            _check_files(Path(checkpoint), config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, output_loading_info=True, **SAFELY
        )
    except (OSError, SafetensorError, *FAILURES) as error:
        raise UserError(f"Cannot load {checkpoint} ({_reason(checkpoint, error)}). {COMPLETE}") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(loading[problem]):
            raise UserError(f"Cannot load {checkpoint}: {problem.replace('_', ' ')} {keys[:3]} ({len(keys)} in all).")
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{checkpoint} has weights that are not finite ({name}). Pass another checkpoint.")
    if hasattr(config, "true_vocab_size"):
        return plain_model(config, model.state_dict())
    return model.eval()


def _reason(checkpoint: str, error: Exception) -> str:
    return in_a_line(error) if Path(checkpoint).exists() else hub_reason(error)


def load_experts(model: PreTrainedModel, checkpoint: str) -> bool:
    """Load a checkpoint's weights into `model` if `model` is a mixture of experts.

    Return whether the weights were loaded. A dense model is not changed. Trainer (5.23) cannot load the experts,
    because their weights have different names in a saved checkpoint and in the model, and Trainer skips unknown names.
    Without this function, a resumed run would continue with untrained experts.
    """
    if not isinstance(model, MixtralForCausalLM):
        return False
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint, **SAFELY).state_dict())
    return True


def _check_files(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UserError for weight files that cannot belong to a folder's configuration.

    Weight files must be inside `folder`, and contain at least as many tensors as the configuration has layers. This is
    checked before the model is built, because building a model of 200,000 layers takes minutes. Shapes of tensors are
    not checked, because transformers rejects wrong shapes before it builds the model.
    """
    single, index = folder / "model.safetensors", read_object(folder / "model.safetensors.index.json")
    names = {single.name} if single.is_file() else {str(name) for name in index.get("weight_map", {}).values()}
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"{folder} lists a weight file outside of the folder: {outside[0]}. Pass another checkpoint.")
    if not names or not all((folder / name).is_file() for name in names):
        return  # transformers reports the missing files
    tensors = 0
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            tensors += len(file.keys())
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0)) > tensors:
        found = f"{folder} has {tensors:,} tensors, too few for the {layers:,} layers of its config.json."
        raise UserError(f"{found} Pass another model.")


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hub id.

    Raises UserError if the tokenizer is missing or cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises no subclass for a damaged tokenizer.json
        raise UserError(
            f"Cannot load the tokenizer of {checkpoint} ({_reason(checkpoint, error)}). {COMPLETE}"
        ) from None


def load_pair(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a folder or Hub id.

    Raises UserError if the model or the tokenizer cannot be loaded.
    """
    return load_model(checkpoint), load_tokenizer(checkpoint)


def start_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, window: int | None = None) -> list[int]:
    """Return the token ids from which text generation starts.

    These are the ids of the prompt. If the prompt is empty, it is the id that starts a document.

    Raises UserError for a prompt that fills the window or cannot be encoded. Also raises UserError for an empty prompt
    if the tokenizer has no id that starts a document.
    """
    try:
        ids = tokenizer(prompt, verbose=False)["input_ids"] or [tokenizer.bos_token_id]
    except Exception as error:  # raised by `tokenizers` if a character tokenizer lacks a character
        raise UserError(f"Cannot encode the prompt {prompt!r} ({error}). Use only characters of the data.") from None
    if ids == [None]:
        fix = "Pass a prompt (--sample_prompt in training, --prompt in generate), or --sample_tokens 0 in training."
        raise UserError(f"This tokenizer has no token that starts a document. {fix}")
    if window and len(ids) >= window:
        raise UserError(f"The prompt has {len(ids)} tokens and fills the window of {window}. Pass a shorter prompt.")
    return ids


def untrained_like(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Return a model of the same architecture with new random weights.

    The global random state is not changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(plain_config(model.config), dtype=torch.float32).eval()
