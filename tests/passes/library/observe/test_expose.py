"""expose: attention weights, residual stream, logits of layers, routes and states, as transformers returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.ir import Graph, interpret, ops, parse
from weft.passes import run_passes

from ....e2e.families import LENGTH, ROWS, error
from ...rewrites import Rewrite, rewrites
from .hooked import IDS, call, feeds, load

TOLERANCE = 1e-4
# What transformers returns for these is not comparable: ALiBi twice, states in place of weights, rotations that grow
# with the length of the longest text, weights without sinks, other numbers of streams or heads, other lists of layers.
APART = ("falcon-sequential", "minimax", "rwkv", "llama-dynamic", "longrope", "gemma3n", "_swa", "jetmoe", "mamba")
COMPARED = [n for n, row in ROWS.items() if row.is_decoder and not any(part in n for part in APART)]
FIRST = ("gpt-oss", "gemma2", "mixtral")  # sinks and windows; norms on both sides; experts


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def exposed(graph: Graph, options: str, **more: np.ndarray) -> dict[str, np.ndarray]:
    """The results of the interpreter after expose{options}."""
    made = run_passes(graph, f"expose{{{options}}}")
    return interpret(made, feeds(made, **more))


def of(kind: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of a kind, by place."""
    return {name.removeprefix(f"{kind}."): array for name, array in values.items() if name.startswith(f"{kind}.")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.long) for n in COMPARED])
def test_attention_and_residual_equal_transformers(name: str, tmp_path: Path) -> None:
    model, graph = load(name, tmp_path)
    want = call(model, output_attentions=True, output_hidden_states=True, use_cache=False)
    got = interpret(made := run_passes(graph, "expose"), feeds(made))
    residual, weights = list(of("residual", got).values()), list(of("attention", got).values())
    states = want.hidden_states
    attentions = [a for a in getattr(want, "attentions", None) or () if a is not None]
    assert (len(residual), len(weights)) == (len(states), len(attentions))
    for i, (a, b) in enumerate(zip(residual[:-1], states[:-1], strict=True)):  # the last one is after the final norm
        assert error(a, b.numpy()) < TOLERANCE, f"residual stream before layer {i}"
    for a, b in zip(weights, attentions, strict=True):
        assert np.abs(a - b.numpy()[..., : a.shape[-1]]).max() < TOLERANCE  # some return the weight of the sink too


def test_logits_of_layers_are_the_head_on_the_residual_stream(tmp_path: Path) -> None:
    model, graph = load("gemma2", tmp_path)  # with a cap of the logits
    want = call(model, output_hidden_states=True).hidden_states
    got = exposed(graph, "what=logits")
    chosen = exposed(graph, "what=logits, tokens=chosen", chosen_tokens=np.array([[LENGTH - 1, 2]]))
    for i, state in enumerate(want[1:-1]):
        with torch.inference_mode():
            logits = model.lm_head(model.model.norm(state)) / model.config.final_logit_softcapping
            logits = (torch.tanh(logits) * model.config.final_logit_softcapping).numpy()
        assert error(got[f"logits.layers.{i}"], logits) < TOLERANCE
        assert error(chosen[f"logits.layers.{i}"], logits[:, [LENGTH - 1, 2]]) < TOLERANCE
    last = f"logits.layers.{len(want) - 2}"
    np.testing.assert_array_equal(got[last], got["logits"])
    np.testing.assert_allclose(chosen[last], got["logits"][:, [LENGTH - 1, 2]], rtol=1e-12)


def test_routes_are_the_weights_of_experts(tmp_path: Path) -> None:
    model, graph = load("mixtral", tmp_path)
    want, k = call(model, output_router_logits=True).router_logits, model.config.num_experts_per_tok
    got = of("routes", exposed(graph, "what=routes"))
    assert list(got) == [f"layers.{i}.ffn" for i in range(len(want))]
    for weights, logits in zip(got.values(), want, strict=True):
        best = torch.softmax(logits.double(), -1).topk(k)
        expected = torch.zeros_like(logits, dtype=torch.float64)
        expected.scatter_(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        assert error(weights[0], expected.numpy()) < TOLERANCE


@pytest.mark.parametrize("options", ["what=states", 'what="states, residual"'])
def test_states_are_those_after_the_last_token(options: str, tmp_path: Path) -> None:
    model, graph = load("mamba", tmp_path)
    want: Any = call(model, use_cache=True).cache_params
    got = of("states", exposed(graph, options))
    assert len(got) == 2 * len(model.backbone.layers)  # a convolution and a state space each
    for i in range(len(model.backbone.layers)):
        state = next(array for name, array in got.items() if name.startswith(f"layers.{i}.") and name.endswith("ssm"))
        layer = want.layers[i].recurrent_states[0] if hasattr(want, "layers") else want.ssm_states[i]
        assert error(np.squeeze(state), np.squeeze(layer.numpy()).T) < TOLERANCE


def test_an_encoder(tmp_path: Path) -> None:
    model, graph = load("bert", tmp_path)
    want = call(model, output_attentions=True, output_hidden_states=True)
    got = exposed(graph, "what=all", token_type_ids=np.zeros_like(IDS))
    for kind, states in (("residual", want.hidden_states), ("attention", want.attentions)):
        for a, b in zip(of(kind, got).values(), states, strict=True):
            assert error(a, b.numpy()) < TOLERANCE


def test_caches_do_not_change_what_is_seen(tmp_path: Path) -> None:
    """The last tokens of a call that continues a cache see the keys of the first ones."""
    _, graph = load("gpt-oss", tmp_path)
    full = of("attention", exposed(graph, "what=attention"))
    cached = run_passes(graph, "kv-cache, concat-caches, expose{what=attention}")
    past = {n: np.zeros(v.type.concrete({"batch": 1, "past": 0})) for n, v in cached.inputs.items() if "past" in n}
    cut = 19
    for start, stop in ((0, cut), (cut, LENGTH)):
        inputs = {
            "input_ids": IDS[:, start:stop],
            "position_ids": np.arange(start, stop)[None],
            "attention_mask": np.ones((1, stop), np.int64),
        }
        got = interpret(cached, {n: inputs[n] if n in inputs else past[n] for n in cached.inputs})
        for name, weights in of("attention", got).items():
            np.testing.assert_allclose(weights, full[name][..., start:stop, :stop], atol=1e-12)
        past = {n: got[n.replace("past_key_values", "present")] for n in past}


def test_layers_and_parts() -> None:
    graph = parse(
        """graph two {
          input %input_ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %w: f32[4, 4] = normal([4, 4], std=1.0, stream="w")
          %x: f32[batch, seq, 4] = embedding(%input_ids, %embed)
          scope layers.0
            %.w: f32[batch, seq, 4] = linear(%x, %w)
            %.sum: f32[batch, seq, 4] = add(%x, %.w)
          scope layers.1
            %.w: f32[batch, seq, 4] = linear(%layers.0.sum, %w)
            %.sum: f32[batch, seq, 4] = add(%layers.0.sum, %.w)
          scope _
          %logits: f32[batch, seq, 11] = linear(%layers.1.sum, %embed)
          output logits = %logits
        }"""
    )
    made = run_passes(graph, "expose{what=parts, layers=1}")
    assert list(made.outputs) == ["logits", "parts.layers.1.w", "parts.layers.1.sum"]
    made = run_passes(graph, "expose{what=residual, layers=0}")
    assert list(made.outputs) == ["logits", "residual.layers", "residual.layers.0"]
    assert made.outputs["residual.layers"].name == "x"
    assert ops.embedding in {node.op for node in made.nodes}
