"""ablate: scaled heads, hidden units, experts and sublayers equal transformers with hooks that scale them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.ir import Graph, interpret
from weft.passes import run_passes

from ....e2e.families import error
from ...rewrites import Rewrite, rewrites
from .hooked import call, changed, feeds, load

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def scaled(graph: Graph, options: str, **inputs: np.ndarray) -> np.ndarray:
    """The logits after ablate{options} with some of its inputs (a / in a name is a dot)."""
    made = run_passes(graph, f"ablate{{{options}}}")
    return interpret(made, feeds(made, **inputs))["logits"]


def numpy(model: object) -> np.ndarray:
    return np.asarray(call(model).logits.numpy())


def test_heads(tmp_path: Path) -> None:
    model, graph = load("gpt-oss", tmp_path)
    scales = np.linspace(-1.0, 2.0, model.config.num_attention_heads)
    projection = model.model.layers[1].self_attn.o_proj
    by_feature = torch.from_numpy(scales.repeat(model.config.head_dim)).float()
    with changed({projection: lambda x: x * by_feature}, inputs=True):
        want = numpy(model)
    got = scaled(graph, "what=heads", **{"scale/heads/layers/1/attn": scales})
    assert error(got, want) < TOLERANCE < error(got, numpy(model))
    assert error(scaled(graph, "what=all"), numpy(model)) < TOLERANCE


def test_means_of_heads(tmp_path: Path) -> None:
    model, graph = load("gemma2", tmp_path)
    heads, width = model.config.num_attention_heads, model.config.head_dim
    scales = (np.arange(heads) != 1).astype(float)
    mean = np.linspace(-1.0, 1.0, heads * width) * (1 - scales).repeat(width)
    by_feature, shift = (torch.from_numpy(x).float() for x in (scales.repeat(width), mean))
    with changed({model.model.layers[0].self_attn.o_proj: lambda x: x * by_feature + shift}, inputs=True):
        want = numpy(model)
    inputs = {"scale/heads/layers/0/attn": scales, "mean/heads/layers/0/attn": mean}
    assert error(scaled(graph, "what=heads, mean=true", **inputs), want) < TOLERANCE


def test_hidden_units(tmp_path: Path) -> None:
    model, graph = load("gemma2", tmp_path)
    scales = np.linspace(0.0, 2.0, model.config.intermediate_size)
    by_unit = torch.from_numpy(scales).float()
    with changed({model.model.layers[2].mlp.down_proj: lambda x: x * by_unit}, inputs=True):
        want = numpy(model)
    assert error(scaled(graph, "what=neurons", **{"scale/neurons/layers/2/ffn": scales}), want) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-mha-biases", "gemma2"])  # gemma2: a norm after the sublayer
def test_sublayers(name: str, tmp_path: Path) -> None:
    model, graph = load(name, tmp_path)
    layer = model.model.layers[1]
    modules = (layer.self_attn, layer.mlp)
    if name == "gemma2":
        modules = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
    for module, sublayer, factor in zip(modules, ("attn", "ffn"), (0.0, 0.5), strict=True):
        with changed({module: lambda x, factor=factor: x * factor}, inputs=False):
            want = numpy(model)
        names = [n for n in run_passes(graph, "ablate{what=sublayers}").inputs if f"layers.1.{sublayer}" in n]
        assert len(names) == 1
        got = scaled(graph, "what=sublayers", **{names[0].replace(".", "/"): np.array([factor])})
        assert error(got, want) < TOLERANCE < error(got, numpy(model))


def test_experts(tmp_path: Path) -> None:
    """An expert without weight adds nothing, as if its output weights were zero."""
    model, graph = load("mixtral", tmp_path)
    scales = np.ones(model.config.num_local_experts)
    scales[2] = 0
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[2] = 0
    assert error(scaled(graph, "what=experts", **{"scale/experts/layers/0/ffn": scales}), numpy(model)) < TOLERANCE
