"""Small graphs to try passes on, built from ops as a frontend would."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Param, Recipe, TensorType, Value, ops, verify
from weft.ir.recipes import Normal
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, parse_pipeline
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

BATCH, SEQ = sizes.sym("batch"), sizes.sym("seq")


def weight(graph: Graph, name: str, *shape: int, recipe: Recipe | None = None) -> Param:
    """A parameter in the current scope."""
    scope = graph.insertion_scope
    full = f"{scope}.{name}" if scope else name
    return graph.add_param(full, TensorType(dtypes.f32, shape), recipe or Normal(shape, 0.3, full))


@dataclass(frozen=True)
class Tiny:
    """A decoder of odd sizes: grouped heads, rope, gated MLP."""

    vocab: int = 37
    dim: int = 18
    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 4
    hidden: int = 23
    window: int | None = None
    bias: str = ""  # which of q, k, v, gate, up have one
    norm: str = "rms"
    qk_norm: bool = False
    rope: bool = True
    tied: bool = False
    alibi: bool = False

    def graph(self) -> Graph:
        g = Graph("tiny")
        g.meta["kind"] = "decoder"
        ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
        at = g.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ))) if self.rope else None
        table = weight(g, "embed.weight", self.vocab, self.dim)
        x = ops.embedding(ids, table, name="embed")
        frequencies = weight(g, "rope.frequencies", self.head_dim // 2, recipe=RopeFrequencies(self.head_dim))
        for i in range(self.layers):
            with g.scope(f"layers.{i}"):
                x = ops.add(x, self.attention(g, self.normed(g, x, "attn_norm"), at, frequencies), name="attn_sum")
                x = ops.add(x, self.mlp(g, self.normed(g, x, "mlp_norm")), name="mlp_sum")
        head = table if self.tied else weight(g, "lm_head.weight", self.vocab, self.dim)
        g.add_output("logits", ops.linear(self.normed(g, x, "final_norm"), head, name="lm_head"))
        return g

    def normed(self, g: Graph, x: Value, name: str) -> Value:
        w = weight(g, f"{name}.weight", self.dim)
        if self.norm == "rms":
            return ops.rms_norm(x, w, eps=1e-5, name=name)
        return ops.layer_norm(x, w, weight(g, f"{name}.bias", self.dim), eps=1e-5, name=name)

    def linear(self, g: Graph, x: Value, rows: int, name: str) -> Value:
        w = weight(g, f"{name}.weight", rows, x.width)
        b = weight(g, f"{name}.bias", rows) if name in self.bias.split() else None
        return ops.linear(x, w, b, name=name)

    def attention(self, g: Graph, x: Value, at: Value | None, frequencies: Param) -> Value:
        with g.scope("attn"):
            q = self.rotated(g, self.linear(g, x, self.heads * self.head_dim, "q"), self.heads, at, frequencies, "q")
            k = self.linear(g, x, self.kv_heads * self.head_dim, "k")
            k = self.rotated(g, k, self.kv_heads, at, frequencies, "k")
            v = self.linear(g, x, self.kv_heads * self.head_dim, "v")
            shape = {"heads": self.heads, "kv_heads": self.kv_heads, "window": self.window}
            y = ops.attention(q, k, v, self.slopes(g, x) if self.alibi else None, causal=True, **shape)
            return self.linear(g, y, self.dim, "o")

    def rotated(self, g: Graph, x: Value, heads: int, at: Value | None, frequencies: Param, name: str) -> Value:
        if self.qk_norm:
            split = ops.reshape(x, shape=(BATCH, SEQ, heads, self.head_dim))
            normed = ops.rms_norm(split, weight(g, f"{name}_norm.weight", self.head_dim), eps=1e-6)
            x = ops.reshape(normed, shape=(BATCH, SEQ, heads * self.head_dim))
        return x if at is None else ops.rope(x, at, frequencies, heads=heads, name=f"{name}_rope")

    def slopes(self, g: Graph, x: Value) -> Value:
        """ALiBi as a bias per head and key [1, heads, 1, keys]; rows are invariant to a constant."""
        per_head = weight(g, "slopes", 1, self.heads, 1, 1)
        return ops.mul(per_head, ops.cast(ops.iota(x, axis=1), to=dtypes.f32))

    def mlp(self, g: Graph, x: Value) -> Value:
        with g.scope("mlp"):
            gated = ops.glu(self.linear(g, x, self.hidden, "gate"), self.linear(g, x, self.hidden, "up"))
            return self.linear(g, gated, self.dim, "down")


def count(graph: Graph, op: str) -> int:
    """Count the nodes that apply `op`."""
    return sum(n.op.name == op for n in graph.nodes)


def worst(before: Graph, after: Graph, seed: int = 0) -> float:
    """The largest relative difference between the outputs of two graphs of one interface, on equal random numbers."""
    equivalence = EquivalenceCheck(seed)
    inputs = equivalence.make_inputs(before)
    a, b = equivalence.run(before, inputs), equivalence.run(after, inputs)
    assert list(a) == list(b)
    return max(measure_difference(a[name], b[name]) for name in a)


def applied(text: str, graph: Graph, trace: Trace | None = None) -> Graph:
    """A copy of `graph` after the passes `text`, well formed; the trace of the last."""
    copy = graph.clone()
    for one in parse_pipeline(text).passes:
        one.run(copy, trace if trace is not None else Trace())
        verify(copy, recipes=True)
    return copy
