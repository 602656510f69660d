"""The text form round-trips; errors name line and column."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from weft.ir import Graph, TensorType, WeftError, ops, parse, verify
from weft.ir.recipes import Cast, Concat, Full, Literal, Normal, Permute, Slice, Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.ir.types.sizes import maximum, minimum, sym

BATCH, SEQ, PAST = sym("batch"), sym("seq"), sym("past")


def decoder(layers: int = 2, dim: int = 8, heads: int = 2, vocab: int = 11) -> Graph:
    """A small decoder with everything text has to carry: scopes, cache, tied weights, packed recipes, meta."""
    graph = Graph("tiny-decoder.v2")
    graph.meta.update(kind="decoder", eos_token_ids=[1, 2], source={"file": 'a "b"\n'}, ratio=0.5, none=None)
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    at = graph.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    mask = graph.add_input("attention_mask", TensorType(dtypes.i64, (BATCH, PAST + SEQ)))
    table = graph.add_param("embed.weight", TensorType(dtypes.f32, (vocab, dim)), Source("wte.weight"))
    frequencies = RopeFrequencies(4, 1e6, scaling="yarn", factor=4.0, original=4096)
    turns = graph.add_param("freqs", TensorType(dtypes.f32, (2,)), frequencies)

    def weight(name: str, *shape: int) -> object:
        full = f"{graph.insertion_scope}.{name}"
        return graph.add_param(full, TensorType(dtypes.f32, shape), Normal(shape, 0.02, full))

    h = ops.embedding(ids, table, name="embed")
    for i in range(layers):
        with graph.scope(f"layers.{i}"):
            cache = [
                graph.add_input(f"past.{i}.{kv}", TensorType(dtypes.f32, (BATCH, heads, sym("capacity"), dim // heads)))
                for kv in ("k", "v")
            ]
            packed = Concat((Permute(Source(f"{i}.qk"), (1, 0)), Slice(Source(f"{i}.v"), 0, 0, dim)))
            qkv = graph.add_param(
                f"layers.{i}.qkv.weight", TensorType(dtypes.f32, (3 * dim, dim)), Cast(packed, "bf16")
            )
            with graph.scope("attn"):
                q, k, v = ops.split.emit(ops.linear(h, qkv), sizes=(dim,) * 3, name=("q", "k", "v"))
                q, k = (ops.rope(t, at, turns, heads=heads, amplitude=1.1) for t in (q, k))
                y, *present = ops.attention.emit(
                    q, k, v, None, mask, None, *cache, at, heads=heads, kv_heads=heads, causal=True, softcap=30.0
                )
            h, _ = ops.add_norm(h, y, weight("norm.weight", dim))
            for kv, value in zip(("k", "v"), present, strict=True):
                graph.add_output(f"present.{i}.{kv}", value)
    graph.add_output("logits", ops.linear(h, table, name="lm_head"))
    return graph


def assorted() -> Graph:
    """Corners: aliases, infinities, empty lists, bool, dtype and size attributes, strings, literals, opaque sizes."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType(dtypes.bf16, (BATCH, 2 * SEQ + 1, 6)), "renamed/x-1")
    graph.add_input("scalar", TensorType(dtypes.u8, ()))
    graph.add_input("odd", TensorType(dtypes.i4, (minimum(SEQ, 4), maximum(PAST * SEQ, 1), BATCH * BATCH)))
    graph.add_param("lit", TensorType(dtypes.f32, (2, 2)), Literal((1.0, -2.5e-08, math.inf, -math.inf), (2, 2)))
    graph.add_param("ids", TensorType(dtypes.i64, (3,)), Literal((1, -2, 3), (3,)))
    graph.add_param("flags", TensorType(dtypes.bool_, (2,)), Literal((True, False), (2,)))
    graph.add_param("whole", TensorType(dtypes.f32, (2,)), RopeFrequencies(4, theta=500_000, factors=(1, 2)))
    graph.add_param("zero", TensorType(dtypes.f32, ()), Full(0.0, ()))
    ops.reshape(x, shape=(BATCH * (2 * SEQ + 1), 6))
    ops.cast(x, to=dtypes.f16)
    ops.affine(x, by=-1e-300, plus=-math.inf)
    ops.clip(x, low=-0.5)
    ops.clip(x, high=math.inf)
    ops.sum(x, axes=(-1, 0), keepdims=True)
    ops.gelu(x, approximate="tanh")
    ops.concat(x, x, x, axis=2)
    ops.layer_norm(x, None, graph.add_param("b", TensorType(dtypes.bf16, (6,)), Full(1e-07, (6,))))
    return graph


@pytest.mark.parametrize("make", [decoder, assorted, lambda: Graph("empty"), lambda: decoder(1).clone()])
def test_round_trip(make: object) -> None:
    graph = make()  # type: ignore[operator]  # one of the makers above
    text = str(graph)
    again = parse(text)
    assert str(again) == text
    assert again == graph
    verify(again)
    assert again.meta == graph.meta
    assert [n.attrs for n in again.nodes] == [n.attrs for n in graph.nodes]
    assert [v.type for n in again.nodes for v in n.outputs] == [v.type for n in graph.nodes for v in n.outputs]


def test_text_is_readable() -> None:
    text = str(decoder(1))
    for line in (
        "graph tiny-decoder.v2 {",
        '  meta source = {"file": "a \\"b\\"\\n"}',
        "  input %attention_mask: i64[batch, past + seq]",
        '  param %freqs: f32[2] = rope_frequencies(4, theta=1000000.0, scaling="yarn", factor=4.0, original=4096)',
        "  scope layers.0.attn",
        "    %.rope: f32[batch, seq, 8] = rope(%.q, %position_ids, %freqs, heads=2, amplitude=1.1)",
        "  scope layers.0",
        "  scope _",
        "  output logits = %lm_head",
    ):
        assert line in text.splitlines(), text


def test_frequencies_may_be_written_by_position() -> None:
    named = 'rope_frequencies(4, theta=1000000.0, scaling="yarn", factor=4.0, original=4096)'
    text = str(decoder(1))
    assert parse(text.replace(named, 'rope_frequencies(4, 1000000.0, "yarn", 4.0, 4096)')) == parse(text)


def test_comments_and_layout_are_free() -> None:
    text = "# note\ngraph g{input %x:f32[4] # four\n%y:f32[4]=affine(%x,by=2,)output out=%y}"
    graph = parse(text)
    assert str(graph) == "graph g {\n  input %x: f32[4]\n  %y: f32[4] = affine(%x, by=2.0)\n  output out = %y\n}\n"


def test_values_may_be_called_like_another_input() -> None:
    graph = Graph("g")
    graph.add_input("a", TensorType(dtypes.f32, (1,)), "b")
    ops.neg(graph.inputs["a"], name="a")
    assert parse(str(graph)) == graph == graph.clone()


G = "graph g {\n  input %x: f32[1]\n  "  # most errors need a value
BAD = [
    ("1:1: expected graph but found 'grap'", "grap g {}"),
    ("1:7: expected the name of the graph but found '{'", "graph {}"),
    ("1:10: expected meta, input, param, scope, output or a node, found the end", "graph g {"),
    ("2:1: unexpected text after the graph", "graph g {}\nx"),
    ("2:3: expected meta, input, param, scope, output or a node, found 'inpt'", "graph g {\n  inpt %x: f32[1]\n}"),
    ("2:13: unknown dtype 'f33'; known are f64", "graph g {\n  input %x: f33[1]\n}"),
    ("2:17: unexpected character '?'", "graph g {\n  input %x: f32[?]\n}"),
    ("2:17: size 'n +', column 4: expected a size but found the end", "graph g {\n  input %x: f32[n +]\n}"),
    ("2:12: expected : but found '='", "graph g {\n  input %x = f32[1]\n}"),
    ("3:3: graph g already has an input 'x'", G + "input %y: f32[1] as x\n}"),
    ("3:3: value %x is defined twice", G + "input %x: f32[1] as y\n}"),
    ("2:14: not JSON: Expecting value", "graph g {\n  meta key = nope\n}"),
    ("2:22: unknown recipe 'sorce'; known are source, literal", 'graph g {\n  param %w: f32[1] = sorce("k")\n}'),
    ("2:22: recipe source needs key", "graph g {\n  param %w: f32[1] = source()\n}"),
    ("2:34: too many arguments for recipe source", 'graph g {\n  param %w: f32[1] = source("k", 1)\n}'),
    ("2:40: recipe source takes no argument 'nokey'", 'graph g {\n  param %w: f32[1] = source("k", nokey=1)\n}'),
    ("3:24: value %z is not defined before its use", G + "%y: f32[1] = add(%x, %z)\n}"),
    ("3:16: unknown op 'ad'; did you mean", G + "%y: f32[1] = ad(%x, %x)\n}"),
    ("3:16: op add needs operand y", G + "%y: f32[1] = add(%x)\n}"),
    ("3:16: op neg has no attribute 'by'; it has none", G + "%y: f32[1] = neg(%x, by=1)\n}"),
    ("3:16: affine: attribute by='a' is not of type float", G + '%y: f32[1] = affine(%x, by="a")\n}'),
    (
        "3:16: add: operands have dtypes f32 and f16",
        "graph g {\n  input %x: f32[1] input %z: f16[1]\n  %y: f32[1] = add(%x, %z)\n}",
    ),
    ("3:3: %y is declared as f32[2], but op neg gives f32[1]", G + "%y: f32[2] = neg(%x)\n}"),
    ("3:3: the number of outputs of op neg is 1, but the statement names 2", G + "%y: f32[1], %z: f32[1] = neg(%x)\n}"),
    ("3:3: value %x is defined twice", G + "%x: f32[1] = neg(%x)\n}"),
    ("3:19: value %q is not defined before its use", G + "output logits = %q\n}"),
    ("4:3: graph g already has an output 'o'", G + "output o = %x\n  output o = %x\n}"),
    ("3:30: expected a value", G + "%y: f32[1] = affine(%x, by="),
    ("2:29: source: attribute key=3 is not of type str", "graph g {\n  param %w: f32[1] = source(3)\n}"),
    ("2:38: recipe full takes no second argument 'value'", "graph g {\n  param %w: f32[1] = full(1.0, value=1.0)\n}"),
]


@pytest.mark.parametrize(("message", "text"), BAD)
def test_errors_name_line_and_column(message: str, text: str) -> None:
    with pytest.raises(WeftError) as e:
        parse(text, "model.weft")
    assert str(e.value).startswith(f"model.weft:{message}")


def test_a_fresh_process_knows_every_recipe() -> None:
    """Recipes live in more than one file, and parsing may be the first thing a process does."""
    text = "graph g {\n  param %f: f32[4] = rope_frequencies(8)\n  output f = %f\n}\n"
    program = "import sys; from weft.ir import parse; sys.stdout.write(str(parse(sys.stdin.read())))"
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == text, done.stderr
