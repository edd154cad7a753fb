"""Checkpoints of nanoGPT and build-nanogpt are read, without running code of the file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpt2_repro.errors import UserError
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.initial_weights import follow_checkpoint
from gpt2_repro.model.load import load_model
from gpt2_repro.model.nanogpt import read_nanogpt
from tests.reference import gelu, logits


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 64}
IDS = torch.arange(24).view(2, 12) * 2


def weights(*, bias: bool) -> dict[str, Tensor]:
    """Return weights with the names and shapes of nanoGPT's GPT."""
    torch.manual_seed(0)
    width, made = SHAPE["n_embd"], {}
    sizes = {"attn.c_attn": (3 * width, width), "attn.c_proj": (width, width)}
    sizes |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width), "ln_1": (width,), "ln_2": (width,)}
    modules = {f"h.{layer}.{name}": size for layer in range(SHAPE["n_layer"]) for name, size in sizes.items()}
    for name, size in (modules | {"ln_f": (width,)}).items():
        made[f"transformer.{name}.weight"] = torch.randn(size) / 4 + (len(size) == 1)
        if bias:
            made[f"transformer.{name}.bias"] = torch.randn(size[0]) / 4
    made["transformer.wte.weight"] = made["lm_head.weight"] = torch.randn(SHAPE["vocab_size"], width)
    made["transformer.wpe.weight"] = torch.randn(SHAPE["block_size"], width)
    return made


def expected_logits(state: dict[str, Tensor], gelu: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits of nanoGPT's model, whose matrices are [out, in] and whose biases can be missing."""
    plain = {name: tensor.T if ".c_" in name and tensor.ndim == 2 else tensor for name, tensor in state.items()}
    modules = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
    zeros = {f"{name}.bias": torch.zeros(plain[f"{name}.weight"].shape[-1]) for name in modules}
    return logits(zeros | plain, IDS, SHAPE["n_head"], gelu=gelu)


class GPTConfig:
    """Has the place of build-nanogpt's class, which is in the script that was started."""


GPTConfig.__module__ = "__main__"


def saved(path: Path, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, *, build: bool = False) -> Path:
    if build:
        monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
        config = GPTConfig()
        config.__dict__ |= SHAPE
        content: dict[str, Any] = {"model": state, "config": config, "step": 5, "val_loss": 3.0}
    else:
        settings = SHAPE | {"bias": "transformer.ln_f.bias" in state, "dropout": 0.0}
        content = {"model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}, "model_args": settings}
        content |= {"config": {"dataset": "openwebtext"}, "iter_num": 7, "best_val_loss": torch.tensor(3.0)}
    torch.save(content, path)
    return path


@pytest.mark.parametrize(("bias", "build"), [(True, False), (False, False), (True, True)])
def test_the_logits_are_nanogpts(bias: bool, build: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = weights(bias=bias)
    state["transformer.h.0.attn.bias"] = torch.ones(24, 24).tril()[None, None]  # the mask of older versions
    path = saved(tmp_path / "ckpt.pt", state, monkeypatch, build=build)
    model = load_model(str(path))
    with torch.inference_mode():
        assert torch.allclose(model(IDS).logits, expected_logits(state, gelu if build else functional.gelu), atol=1e-5)


@pytest.mark.parametrize("build", [False, True])
def test_a_run_starts_from_its_weights(build: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = weights(bias=build)
    path = saved(tmp_path / "ckpt.pt", state, monkeypatch, build=build)
    section = follow_checkpoint(ModelArguments(init_from=str(path), pad_vocab_to_multiple_of=64), stated=())
    assert (section.n_layer, section.n_head, section.n_embd) == (2, 2, 16)
    config = build_config(section, sequence_length=24, vocab_size=60)  # nanoGPT pads the vocabulary too
    if not build:  # build-nanogpt's GELU is GPT-2's, under another name
        with pytest.raises(UserError, match='"activation_function": "gelu"'):
            build_model(config, attention="causal_sdpa", init_from=str(path))
        config.activation_function = "gelu"
    model = build_model(config, attention="causal_sdpa", init_from=str(path))
    assert torch.equal(model.transformer.wte.weight[:60], state["transformer.wte.weight"][:60])
    path.unlink()
    section = ModelArguments(init_from=str(path))
    assert follow_checkpoint(section, stated=()) is section  # a resumed run does not need it


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("attacked"),)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = weights(bias=True)
    tied = state | {"lm_head.weight": state["lm_head.weight"] + 1}
    missing = {name: tensor for name, tensor in state.items() if "h.1.mlp.c_fc.weight" not in name}
    for words, problem in ((tied, "own weights"), (missing, "h.1.mlp.c_fc.weight"), ({"lm_head.weight": state}, "pt")):
        saved(Path("ckpt.pt"), words, monkeypatch)
        with pytest.raises(UserError, match=problem):
            read_nanogpt(Path("ckpt.pt"))
    torch.save({"model": state, "model_args": SHAPE, "config": Attack()}, "ckpt.pt")
    with pytest.raises(UserError, match="not a checkpoint of nanoGPT"):
        read_nanogpt(Path("ckpt.pt"))
    assert not Path("attacked").exists()
    content = Path("ckpt.pt").read_bytes()
    for damaged in (b"", content[:4], content[:1000], b"text"):
        Path("ckpt.pt").write_bytes(damaged)
        with pytest.raises(UserError, match="not a checkpoint of nanoGPT"):
            read_nanogpt(Path("ckpt.pt"))


WTE = "transformer.wte.weight"


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        *(({name: wrong}, {}) for name in SHAPE for wrong in (10**7, -1, "many")),
        ({"n_layer": 10**9}, {}),
        ({"n_head": 3}, {}),
        ({"n_head": 0}, {}),
        ({"n_embd": 10**6}, {WTE: torch.zeros(1).expand(64, 10**6)}),  # a large shape with small storage
        ({}, {WTE: torch.zeros(1, dtype=torch.bfloat16).expand(10**6, 10**6)}),
        ({}, {WTE: torch.zeros(3)}),
        ({}, {WTE: 3}),
        ({}, {"transformer.h.0.mlp.c_fc.weight": torch.zeros(1, 2, 3)}),
    ],
)
def test_a_false_shape_is_refused_before_anything_is_built(shape: dict, changes: dict, tmp_path: Path) -> None:
    path, settings = tmp_path / "ckpt.pt", {**SHAPE, **shape}
    torch.save({"model": weights(bias=True) | changes, "model_args": settings}, path)
    with pytest.raises(UserError, match=r"ckpt\.pt"):
        read_nanogpt(path)
    # Weights that would show the shape are missing.
    torch.save({"model": {"lm_head.weight": torch.zeros(2, 2)}, "model_args": settings | {"n_embd": 10**6}}, path)
    with pytest.raises(UserError, match=r"ckpt\.pt"):
        read_nanogpt(path)
