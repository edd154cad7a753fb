"""Load what training or anyone else saved: plain fp32 models from safetensors, never pickles, never remote code."""

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
    """Return the plain fp32 model of a folder or Hub id, in evaluation mode, with its true vocabulary.

    A folder may come from a stranger. Its attention implementation is ignored, because transformers would download a
    kernel that it names. Raises UserError if the model cannot be fetched, is quantized, has no safetensors, or if its
    weights do not fit its configuration or are not finite.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{checkpoint} is quantized. Pass a checkpoint with fp32, bf16 or fp16 weights.")
        config._attn_implementation = None  # of nested configurations too: transformers chooses SDPA or eager
        if Path(checkpoint).is_dir():
            _check_files(Path(checkpoint), config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, output_loading_info=True, **SAFELY
        )
    except (OSError, SafetensorError, *FAILURES) as error:
        raise UserError(f"cannot load {checkpoint}. {COMPLETE} ({_reason(checkpoint, error)})") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(loading[problem]):
            raise UserError(f"cannot load {checkpoint}: {problem.replace('_', ' ')} {keys[:3]} ({len(keys)} in all)")
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{checkpoint} has weights that are not finite ({name}). Pass another checkpoint.")
    if hasattr(config, "true_vocab_size"):
        return plain_model(config, model.state_dict())
    return model.eval()


def _reason(checkpoint: str, error: Exception) -> str:
    return in_a_line(error) if Path(checkpoint).exists() else hub_reason(error)


def load_experts(model: PreTrainedModel, checkpoint: str) -> bool:
    """Load the weights of a mixture of experts and return True, or return False for a dense model.

    transformers saves experts under other names. Trainer (5.23) skips those and continues with fresh experts.
    """
    if not isinstance(model, MixtralForCausalLM):
        return False
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint, **SAFELY).state_dict())
    return True


def _check_files(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UserError for weights outside of `folder`, or for fewer tensors than the configuration has layers.

    Building a model of 200,000 layers takes minutes. transformers refuses tensors of other shapes before it builds them.
    """
    single, index = folder / "model.safetensors", read_object(folder / "model.safetensors.index.json")
    names = {single.name} if single.is_file() else {str(name) for name in index.get("weight_map", {}).values()}
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"{folder} names weights outside of it: {outside[0]}")
    if not names or not all((folder / name).is_file() for name in names):
        return  # transformers says what is missing
    tensors = 0
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            tensors += len(file.keys())
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", 0)) > tensors:
        raise UserError(f"{folder} has {tensors:,} tensors and its config.json asks for {layers:,} layers")


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hub id. Raises UserError if there is none that loads."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises nothing narrower for a damaged tokenizer.json
        raise UserError(
            f"{checkpoint} has no tokenizer that loads. {COMPLETE} ({_reason(checkpoint, error)})"
        ) from None


def load_pair(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a folder or Hub id. Raises UserError as the two do."""
    return load_model(checkpoint), load_tokenizer(checkpoint)


def start_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, window: int | None = None) -> list[int]:
    """The ids that a sample continues: the prompt's, or the one that starts a document.

    Raises UserError for a prompt that leaves no room in the window or cannot be encoded, and where nothing can start a
    document.
    """
    try:
        ids = tokenizer(prompt, verbose=False)["input_ids"] or [tokenizer.bos_token_id]
    except Exception as error:  # `tokenizers` raises nothing narrower: a tokenizer of characters knows its own alone
        raise UserError(f"the prompt {prompt!r} cannot be encoded ({error}): use characters of the data") from None
    if ids == [None]:
        fix = "Pass --sample_prompt TEXT or --sample_tokens 0 in training, --prompt TEXT in generate."
        raise UserError(f"This tokenizer has no token that starts a document. {fix}")
    if window and len(ids) >= window:
        raise UserError(f"the prompt has {len(ids)} tokens and leaves no room in a window of {window}")
    return ids


def untrained_like(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """The same architecture with fresh weights, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(plain_config(model.config), dtype=torch.float32).eval()
