"""Names of graphs as Python identifiers: modules run under any names, and their weights go back into the graph."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch

import weft
from weft import Attention, Block, Decoder, GatedMLP, Mamba2, MoE, RMSNorm, RoPE
from weft.backends.torch.lower.identifiers import map_argument_names, rename_for_python
from weft.ir import interpret, parse, verify
from weft.ir.graph import Graph

from ....sampling import ALL

WORDS = (
    "def None True class lambda in is scores logits self cache last x y F nn torch Tensor forward training parameters "
    "state_dict train eval children _parameters __init__ __class__ __dict__ a-b a_b a/b 1 0 2x - / _ __ print len "
    "range dtype type zip min math Attention Model Block Snippet new_cache weight bias half float to apply mask super "
    "position_ids list layers batch length state args run layer is_causal size seq past total Cache rotary"
)
MODELS = {
    "dense": Decoder(23, 16, layers=2, block=Block(Attention(2, 1, rope=RoPE()), GatedMLP(24), RMSNorm()), context=32),
    "experts": Decoder(23, 16, layers=2, block=Block(Attention(2, rope=RoPE()), MoE(4, 24, 2), RMSNorm()), context=32),
    "recurrent": Decoder(23, 16, layers=2, block=Block(Mamba2(32, heads=2, state=4), norm=RMSNorm()), context=32),
}


@cache
def graph_of(kind: str) -> Graph:
    return MODELS[kind].graph()


def renamed(graph: Graph, rng: random.Random) -> Graph | None:
    """Return a copy of `graph` with some names replaced by `WORDS`; None if two names would be equal."""
    graph = graph.clone()
    values = [*graph.inputs.values(), *graph.params.values(), *(v for node in graph.nodes for v in node.outputs)]
    scopes = {node.scope for node in graph.nodes}
    new = {name: name for name in [*scopes, *(v.name for v in values)]}
    inputs, outputs = {name: name for name in graph.inputs}, {name: name for name, _ in graph.outputs.items()}
    for _ in range(rng.randint(1, 4)):
        name, word = rng.choice(sorted(new)), rng.choice(WORDS.split(" "))
        part = rng.choice(name.split("."))
        match rng.randrange(4):
            case 0:  # one name
                new[name] = word
            case 1:  # a part of one
                new[name] = ".".join(word if p == part else p for p in new[name].split("."))
            case 2:  # a part of all
                new = {n: ".".join(word if p == part else p for p in at.split(".")) for n, at in new.items()}
            case _:
                ends = rng.choice([inputs, outputs])
                ends[rng.choice(sorted(ends))] = word
    if any(len({*found.values()}) < len(found) for found in (new, inputs, outputs)):
        return None
    for value in values:
        value.name = new[value.name]
    for node in graph.nodes:
        node.scope = new[node.scope]
    params, given, made = list(graph.params.values()), dict(graph.inputs), dict(graph.outputs.items())
    graph.params.clear()
    graph.params.update({p.name: p for p in params})
    graph.inputs.clear()
    graph.inputs.update({inputs[name]: value for name, value in given.items()})
    for name in made:
        del graph.outputs[name]
    for name, value in made.items():
        graph.outputs[outputs[name]] = value
    return graph


@pytest.mark.parametrize("kind", MODELS)
def test_modules_run_under_any_names(kind: str) -> None:
    checked = 0
    for seed in range(40):
        graph = renamed(graph_of(kind), random.Random(f"{kind} {seed}"))
        if graph is None:
            continue
        check(graph)
        checked += 1
        if checked == (12 if ALL else 4):
            return
    raise AssertionError(f"{checked} graphs are too few")


def check(graph: Graph) -> None:
    verify(graph, recipes=True)
    ids = np.arange(5)[None]
    want, *_ = interpret(graph, dict.fromkeys(graph.inputs, ids)).values()
    module = weft.torch(graph)
    got = module(**{name: torch.from_numpy(ids) for name in map_argument_names(graph).values()})
    got = got[0] if isinstance(got, tuple) else got
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=0, atol=1e-5)
    back = weft.with_weights(graph, module.state_dict())
    again, *_ = interpret(back, dict.fromkeys(graph.inputs, ids)).values()
    np.testing.assert_allclose(again, want, rtol=0, atol=1e-5)


def test_valid_names_are_unchanged() -> None:
    graph = graph_of("dense")
    before = str(graph)
    assert rename_for_python(graph) == [] and str(graph) == before


def test_siblings_get_distinct_identifiers() -> None:
    text = """graph g {
      input %class: f32[batch, 4] as a-b
      input %in: f32[batch, 4] as a_b
      %q-1: f32[batch, 4] = add(%class, %in)
      output def = %q-1
      output def_ = %in
    }"""
    graph = parse(text)
    assert rename_for_python(graph)
    assert list(graph.inputs) == ["a_b_2", "a_b"]
    assert [v.name for v in graph.inputs.values()] == ["class_", "in_"]
    assert [name for name, _ in graph.outputs.items()] == ["def__2", "def_"]
