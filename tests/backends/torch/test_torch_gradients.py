"""Gradients of generated modules against those of transformers: a cross entropy pulled back to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.backends.torch.lower.identifiers import map_parameter_names
from weft.frontends.formats.hf.folder import load_folder
from weft.ir.recipes import Add, Concat, Permute, Reshape, Slice, Source
from weft.ir.recipes.recipe import Recipe

from ...e2e.families import ROWS, VOCAB
from ...e2e.seq2seq import SEQ2SEQ
from ...lowered import build_module

FAMILIES = ("llama-gqa-tied", "gpt2-tied", "gpt_neox", "gemma2", "bloom", "mixtral", "deepseek-v3", "mamba", "mamba2")
TOLERANCE = 1e-4  # of the largest gradient in a tensor
SMALL = 1e-3  # of the largest of all: below it a tensor's own rounding errors are what is left


def made(recipe: Recipe, checkpoint: dict[str, Tensor]) -> Tensor:
    """Evaluate `recipe` on the tensors of a checkpoint, differentiably."""
    match recipe:
        case Source(key=key):
            return checkpoint[key]
        case Concat(items=items, axis=axis):
            return torch.cat([made(r, checkpoint) for r in items], axis)
        case Slice(item=item, axis=axis, start=start, stop=stop, step=step):
            x = made(item, checkpoint).movedim(axis, 0)
            return x[start:stop:step].movedim(0, axis)
        case Permute(item=item, axes=axes):
            return made(item, checkpoint).permute(axes)
        case Reshape(item=item, dims=dims):
            return made(item, checkpoint).reshape(dims)
        case Add(items=items, offset=offset):
            return torch.stack([made(r, checkpoint) for r in items]).sum(0) + offset
    raise AssertionError(f"a recipe that this test does not know: {type(recipe).__name__}")


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def saved_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients of `model` by checkpoint key: how it saves is linear, so its gradients are saved as its weights."""
    for p in model.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    for b in model.buffers():
        b.zero_()
    model.save_pretrained(folder)
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


def check(folder: Path, model: nn.Module, inputs: dict[str, Tensor], logits: Tensor, ids: Tensor) -> None:
    """Our gradients on `inputs` of the model in `folder` are those of `model`, which made `logits`."""
    graph = load_folder(folder / "model")[1].graph
    module = build_module(graph)
    weights = {
        key: t for file in sorted((folder / "model").glob("*.safetensors")) for key, t in load_file(file).items()
    }
    loss(module(**inputs), ids).backward()
    loss(logits, ids).backward()
    ours, total = {key: t.clone().requires_grad_() for key, t in weights.items()}, torch.zeros(())
    held = dict(module.named_parameters())
    for key, name in map_parameter_names(graph).items():
        if (p := held.get(key)) is not None and p.grad is not None:
            total = total + (made(graph.params[name].recipe, ours).reshape(p.shape) * p.grad).sum()
    total.backward()
    theirs = saved_gradients(model, folder / "gradients")
    largest = max(float(t.abs().max()) for t in theirs.values())
    assert largest > 0
    for key, want in theirs.items():
        got = ours[key].grad if ours[key].grad is not None else torch.zeros_like(want)
        scale = max(float(want.abs().max()), SMALL * largest)
        assert float((got - want).abs().max()) <= TOLERANCE * scale, key


@pytest.mark.parametrize("name", FAMILIES)
def test_decoder_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    model = ROWS[name].save(tmp_path / "model").eval()
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    check(tmp_path, model, {"input_ids": ids}, model(ids).logits, ids)


def test_encoder_decoder_gradients_equal_transformers(tmp_path: Path) -> None:
    model = SEQ2SEQ["t5"].save(tmp_path / "model").eval()
    generator = torch.Generator().manual_seed(0)
    source, ids = (torch.randint(3, VOCAB, shape, generator=generator) for shape in ((2, 9), (2, 6)))
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    inputs = {"encoder_input_ids": source, "encoder_attention_mask": mask, "input_ids": ids}
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=ids).logits
    check(tmp_path, model, inputs, logits, ids)
