"""The changed trainings that gpu.py measures, and the packages that they need."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Variant(NamedTuple):
    """A change of the training. The name is that of the run."""

    name: str
    options: str = ""  # of train.py
    environment: Mapping[str, str] = {}
    patch: str = ""  # functions of patched_train.py
    needs: str = ""  # modules that must be installed
    launcher: str = "zero1"  # "python": without one
    after: str = ""  # variants that must have run in this call


PACKED = "--attn_implementation packed_cudnn"
CUBLASLT = "--mlp_implementation cublaslt"
FA4 = "--attn_implementation causal_sdpa"  # what the patch uses where it does not apply
AS_IT_IS = Variant("as_it_is")
# In this order, as long as the time suffices. First those that share the compiler cache, then new kernels one by one.
VARIANTS = (
    Variant("rows_128", "--per_device_train_batch_size 128"),
    Variant("logs_5", "--logging_steps 5"),  # each log line waits for the device
    Variant("packed_cudnn", PACKED, needs="cudnn"),
    Variant("cublaslt", CUBLASLT, needs="nvmath"),
    Variant("packed_cudnn_and_cublaslt", f"{PACKED} {CUBLASLT}", needs="cudnn nvmath", after="packed_cudnn cublaslt"),
    Variant("quack_mlp", patch="quack_mlp", needs="cutlass quack"),
    Variant("flash_attention_4", FA4, patch="flash_attention_4", needs="cutlass flash_attn"),
    Variant("quack_loss", patch="quack_loss", needs="cutlass quack"),
    Variant(
        "hopper",
        FA4,
        patch="flash_attention_4 quack_mlp quack_loss",
        needs="cutlass quack flash_attn",
        after="flash_attention_4 quack_mlp quack_loss",
    ),
    Variant(
        "quack_mlp_tuned",
        environment={"QUACK_PRINT_AUTOTUNING": "1"},
        patch="quack_mlp",
        needs="cutlass quack",
        after="quack_mlp",
    ),
    Variant("flash_attention_2", "--attn_implementation flash_attention_2", needs="flash_attn"),
    Variant("causal_sdpa", "--attn_implementation causal_sdpa"),
    Variant("document_mask", "--document_mask true --attn_implementation auto"),
    Variant("ddp", launcher="ddp"),
    Variant("import_times", environment={"PYTHONPROFILEIMPORTTIME": "1"}),  # in its log
    Variant("max_autotune", environment={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}),
    Variant("cuda_graphs", environment={"TORCHINDUCTOR_CUDAGRAPHS": "1"}),
)
# The options of llm.c that change its speed, by the name of the result. -ge: GELU in the epilogues of cuBLASLt.
LLMC_VARIANTS = {
    "llm.c": "-r 1",
    "llm.c, -ge 1": "-r 1 -ge 1",
    "llm.c, -ge 2": "-r 1 -ge 2",
    "llm.c, -r 0": "-r 0",
}


def cutlass_folders() -> list[str]:
    """Return the folders with the modules of nvidia-cutlass-dsl.

    The package is found through a .pth file, which Python does not read in folders of PYTHONPATH.
    """
    folders: list[str] = []
    for entry in sys.path:
        for name in ("dsl_packages", "python_packages"):
            folder = Path(entry or ".", "nvidia_cutlass_dsl", name)
            if folder.is_dir():
                folders.append(str(folder.resolve()))
    return folders


def cuda_libraries() -> list[str]:
    """Return the folders of the CUDA libraries that torch's wheels have installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or [] if spec else []
    return [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))]


def obstacle(variant: Variant, measured: set[str]) -> str | None:
    """Return why a variant cannot be measured, or None. `measured` contains names of variants without an error."""
    for module in variant.needs.split():
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    for name in variant.after.split():
        if name not in measured:
            return f"{name} was not measured"
    return None
