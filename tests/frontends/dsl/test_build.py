"""Emission by modules: names, sharing, initial values, the printed form, and the origin of every scope."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE, load_source
from weft.backends.viz.model.network import build_network
from weft.frontends.dsl import MLP, building, fill, linear, module, named, param, scope, trace
from weft.ir import Graph, Value, ops, verify
from weft.ir.recipes import Full, Normal
from weft.passes import run_passes

from .harness import X


@module
class Pair:
    one: Any
    two: Any

    def __call__(self, x: Value) -> Value:
        return ops.add(self.one(x), self.two(x))


def test_scopes_are_field_names_and_parameters_differ_by_scope() -> None:
    shared = MLP(8)
    graph = trace(Pair(shared, Pair(shared, shared)), {"x": X})
    assert {n.rsplit(".", 2)[0] for n in graph.params} == {"one", "two.one", "two.two"}


def test_a_field_called_twice_shares_parameters() -> None:
    @module
    class Twice:
        inner: MLP

        def __call__(self, x: Value) -> Value:
            return self.inner(self.inner(x))

    graph = trace(Twice(MLP(8)), {"x": X})
    assert set(graph.params) == {"inner.up.weight", "inner.down.weight"}
    assert all(len(p.uses) == 2 for p in graph.params.values())


def test_explicit_names_and_scopes() -> None:
    @module
    class Named:
        norm: RMSNorm

        def __call__(self, x: Value) -> Value:
            x = named(self.norm, "first_norm")(x)
            with scope("deep"):
                x = linear(named(self.norm, "second_norm")(x), 4, "out", bias=True)
            return ops.mul(x, param("gain", (4,), fill(2.0)))

    graph = trace(Named(RMSNorm()), {"x": X})
    assert list(graph.params) == [
        *("first_norm.weight", "deep.second_norm.weight", "deep.out.weight", "deep.out.bias", "gain")
    ]
    assert graph.params["gain"].recipe == Full(2.0, (4,))
    assert next(iter(graph.nodes)).output.name == "first_norm"


def test_modules_in_lists_and_inside_calls_have_names() -> None:
    @module
    class Chain:
        parts: list[Any]

        def __call__(self, x: Value) -> Value:
            for part in self.parts:
                x = part(x)
            return RMSNorm()(RMSNorm()(x))

    graph = trace(Chain([MLP(4), MLP(8), RMSNorm()]), {"x": X})
    assert [n for n in graph.params if n.endswith("norm.weight") or "norm" in n] == [
        *("rms_norm.weight", "rms_norm_2.weight")
    ]
    assert graph.params["parts.1.up.weight"].shape == (8, 16)
    assert "parts.2.weight" in graph.params


def test_derived_modules() -> None:
    @module
    class Wide(MLP):
        scale: float = 1.0

    @module
    class Louder(Wide):
        def __call__(self, x: Value) -> Value:
            return ops.affine(super().__call__(x), by=self.scale)

    graph = trace(Pair(Wide(4), Louder(6, scale=2.0)), {"x": X})
    assert set(graph.params) == {f"{a}.{b}.weight" for a in ("one", "two") for b in ("up", "down")}
    with pytest.raises(TypeError, match="module Silent needs a __call__"):

        @module
        class Silent:
            n: int


def test_initialization_follows_name_and_seed() -> None:
    one, two, three = (Decoder(10, 8, 1, Block(Attention(2), MLP(16))).graph(seed=s) for s in (0, 0, 1))
    assert one == two != three
    recipe = one.params["layers.0.ffn.up.weight"].recipe
    assert recipe == Normal((16, 8), 0.02, "layers.0.ffn.up.weight", 0)
    assert one.params["final_norm.weight"].recipe == Full(1.0, (8,))


def test_building_into_an_existing_graph() -> None:
    graph = Graph("mine")
    with building(graph, seed=5):
        x = graph.add_input("x", X)
        graph.add_output("y", MLP(8)(MLP(4)(x)))
    verify(graph, recipes=True)
    assert [p.name for p in graph.params.values()] == [
        *("mlp.up.weight", "mlp.down.weight", "mlp_2.up.weight", "mlp_2.down.weight")
    ]


def test_models_print_as_they_are_written() -> None:
    one, two = MLP(8), MLP(9)
    for layers, text in (
        ([one] * 3, "[MLP(hidden=8)] * 3"),
        ([one, two], "[MLP(hidden=8)] + [MLP(hidden=9)]"),
        (([one] * 2 + [two]) * 4, "([MLP(hidden=8)] * 2 + [MLP(hidden=9)]) * 4"),
        ([one, one, two, one], "[MLP(hidden=8)] * 2 + [MLP(hidden=9)] + [MLP(hidden=8)]"),
    ):
        assert repr(Decoder(10, 8, layers)) == f"Decoder(vocab=10, dim=8, layers={text})"
    rope = RoPE(scaling="longrope", original=9, factors=(1.0, 1.0))
    assert repr(rope) == "RoPE(scaling='longrope', original=9, factors=(1.0, 1.0))"


def test_a_large_model_is_traced_in_seconds() -> None:
    start = time.process_time()
    layer = Block(Attention(128, 8, rope=RoPE(5e5)), GatedMLP(53_248), RMSNorm(1e-5))
    graph = Decoder(128_256, 16_384, 126, layer).graph()
    assert time.process_time() - start < 5
    assert len(graph.params) == 126 * 9 + 4


# -- origins

TEXT = """from dataclasses import replace

from weft import *

local = Block(
    Attention(4, 2, rope=RoPE(), window=16),
    GatedMLP(48),
    RMSNorm(),
)
wide = replace(local, attn=Attention(4, 2, rope=RoPE(5e5)))
model = Decoder(50, 32, [local, wide], context=64)
"""


def test_origins_name_modules_and_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(TEXT)
    found = build_network(load_source(path).graph).origins
    assert found["layers.0.attn"] == ("Attention(heads=4, kv_heads=2, rope=RoPE(), window=16)", "mixed.py:6")
    assert found["layers.1.attn"] == ("Attention(heads=4, kv_heads=2, rope=RoPE(theta=500000.0))", "mixed.py:10")
    assert found["layers.0.ffn"] == ("GatedMLP(hidden=48)", "mixed.py:7")
    assert found["layers.0.attn_norm"][1] == "mixed.py:8"
    text, line = found["layers.1"]
    assert text.startswith("Block(") and line == "mixed.py:10"


def test_origins_skip_the_files_of_weft() -> None:
    found = build_network(load_source(Decoder(50, 32, [Block(Attention(4), GatedMLP(48))])).graph).origins
    assert found["layers.0.attn"][1] == f"{Path(__file__).name}:{_line('[Block(Attention(4), ')}"
    preset = build_network(load_source("llama3.1-8b").graph).origins
    text, line = preset["layers.0.attn"]
    assert text.startswith("Attention(heads=32, kv_heads=8, rope=RoPE(theta=500000") and str(line).startswith(
        "presets.py:"
    )
    assert not any(str(line).startswith(("build.py", "blocks.py", "attention.py")) for _, line in preset.values())


def test_origins_do_not_affect_equality() -> None:
    attn = Attention(4, 2, rope=RoPE())
    again = Attention(4, 2, rope=RoPE())
    assert attn == again and hash(attn) == hash(again) and repr(attn) == repr(again)
    assert [f.name for f in dataclasses.fields(attn)] == [f.name for f in dataclasses.fields(again)]
    one, two = (load_source(Decoder(50, 32, [Block(a, GatedMLP(48), RMSNorm())])).graph for a in (attn, again))
    assert one == two and one.origins != {} and one.clone().origins == one.origins
    assert run_passes(one, "kv-cache").origins == one.origins


def _line(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)
