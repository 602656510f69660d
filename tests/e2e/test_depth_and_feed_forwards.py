"""Surgery on layers and feed-forwards against transformers: a checkpoint rewritten by passes equals the model of torch
to which the same was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import weft
from weft.ir import Graph, interpret
from weft.passes import run_passes

from .families import COMMON, GQA, LENGTH, ROWS, UNTIED, VOCAB, error, reference

TOLERANCE = 1e-5
IDS = np.random.default_rng(3).integers(3, VOCAB, (2, LENGTH))


def logits(graph: Graph) -> np.ndarray:
    """Of the texts IDS, by the references of the ops."""
    inputs = {"input_ids": IDS, "position_ids": np.broadcast_to(np.arange(LENGTH), IDS.shape)}
    return interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"]


def model_and_graph(name: str, folder: Path) -> tuple[torch.nn.Module, Graph]:
    model = ROWS[name].save(folder / "hf")
    return model.eval(), weft.load_source(folder / "hf").graph


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama-gqa-tied", "model.layers"), ("gpt2-tied", "transformer.h"), ("falcon-gqa", "transformer.h")],
)
@pytest.mark.parametrize("first", ["", "pack-qkv, pack-gate-up, fuse-residual-norm, "])
def test_pruned_layers_equal_transformers(name: str, layers: str, first: str, tmp_path: Path) -> None:
    model, graph = model_and_graph(name, tmp_path)
    whole = reference(model, IDS)
    blocks = model.get_submodule(layers)
    del blocks[1]
    want = reference(model, IDS)
    pruned = run_passes(graph, f"{first}prune-layers{{layers=[1]}}")
    assert error(logits(pruned), want) <= TOLERANCE < error(whole, want)


def _activation(name: str, module: torch.nn.Module) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        for part in model.modules():
            if hasattr(part, name):
                setattr(part, name, module)

    return change


@pytest.mark.parametrize(
    ("name", "field", "to", "module"),
    [
        ("llama-gqa-tied", "act_fn", "relu", torch.nn.ReLU()),
        ("gemma2", "act_fn", "gelu", torch.nn.GELU()),
        ("gpt2-tied", "act", "silu", torch.nn.SiLU()),
        ("phi", "activation_fn", "relu", torch.nn.ReLU()),
        ("mixtral", "act_fn", "tanh", torch.nn.Tanh()),
    ],
)
def test_replaced_activations_equal_transformers(
    name: str, field: str, to: str, module: torch.nn.Module, tmp_path: Path
) -> None:
    model, graph = model_and_graph(name, tmp_path)
    whole = reference(model, IDS)
    _activation(field, module)(model)
    want = reference(model, IDS)
    assert error(logits(run_passes(graph, f"replace-activation{{to={to}}}")), want) <= TOLERANCE < error(whole, want)


def test_upcycled_llama_equals_mixtral_with_copied_experts(tmp_path: Path) -> None:
    llama, graph = model_and_graph("llama-gqa-tied", tmp_path)
    graph = run_passes(graph, "upcycle-to-moe{experts=4, top_k=2}")
    shape = COMMON | GQA | UNTIED | {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape, sliding_window=None)).eval()
    state = llama.state_dict()
    for i in range(3):
        gate, up, down = (state.pop(f"model.layers.{i}.mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat([gate, up]).expand(4, -1, -1).clone()
        state[f"model.layers.{i}.mlp.experts.down_proj"] = down.expand(4, -1, -1).clone()
        router = graph.params[f"layers.{i}.ffn.router.weight"].recipe.evaluate(graph.reader)
        state[f"model.layers.{i}.mlp.gate.weight"] = torch.from_numpy(router)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    mixtral.load_state_dict(state)
    want = reference(mixtral, IDS)
    assert error(logits(graph), want) <= TOLERANCE
    assert error(reference(llama, IDS), want) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("granite", "fold-scale"),
        ("cohere", "fold-scale, fuse-parallel-block"),
        ("gemma2", "default, -kv-cache, -rolling-buffer, -last-token-logits, fold-scale, precompute-first-layer"),
        ("falcon-gqa", "fuse-parallel-block, precompute-first-layer, pad-vocab{multiple=64}"),
        ("deepseek-v3", "fold-scale, permute-neurons, merge-shared-experts, collapse-linears"),
        ("gpt2-tied", "insert-layers{after=1, count=2}, permute-neurons, upcycle-to-moe{experts=3}"),
    ],
)
def test_exact_layer_surgery_equals_transformers(name: str, passes: str, tmp_path: Path) -> None:
    model, graph = model_and_graph(name, tmp_path)
    rewritten = run_passes(graph, passes)
    assert str(rewritten) != str(graph)
    assert error(logits(rewritten), reference(model, IDS)) <= TOLERANCE
