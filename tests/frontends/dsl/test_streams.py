"""Embeddings for every layer and several residual streams (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.frontends import dsl
from weft.frontends.dsl.build import Layer
from weft.ir import TensorType, Value, ops
from weft.ir.types import dtypes

from .formulas.attention import attention
from .formulas.elementary import ACTIVATIONS, Array, Weights, in_scope, linear, rms_norm
from .formulas.feed_forward import feed_forward, mixture, top_k
from .harness import RUNNERS, Row, X, check, close, randomize, run

ATTN, FFN, MOE, WIDTH, STREAMS, ACTIVE = dsl.Attention(2), dsl.GatedMLP(10), dsl.MoE(3, 4, 2), 5, 3, 1


def norm(x: Array, w: Weights, name: str) -> Array:
    return rms_norm(x, w[f"{name}.weight"])


@dsl.module
class WithEmbedding:
    """`inner` in a model whose embedding of every layer is the first features of x."""

    inner: Layer

    def __call__(self, x: Value) -> Value:
        with dsl.providing(per_layer=ops.slice(x, axis=2, start=0, stop=WIDTH)):
            return self.inner(x)


def per_layer_input(x: Array, embedding: Array, w: Weights) -> Array:
    gate = ACTIVATIONS["gelu_tanh"](linear(x, w, "gate"))
    return norm(linear(gate * embedding, w, "projection"), w, "norm")


@pytest.mark.parametrize("runner", RUNNERS)
def test_layer_with_input(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        w = in_scope(w, "inner.")
        y = x + feed_forward(FFN, "block.ffn.")(norm(x, w, "block.ffn_norm"), w)
        y = feed_forward(dsl.MLP(7), "ffn.")(y, w)
        return (y + per_layer_input(y, x[:, :WIDTH], in_scope(w, "per_layer."))) * w["scalar"]

    layer = dsl.LayerWithInput(dsl.Block(None, FFN), dsl.MLP(7), dsl.PerLayerInput(WIDTH))
    check(Row(WithEmbedding(layer), formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_split_feed_forward(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        dense = norm(feed_forward(FFN, "dense.")(norm(x, w, "dense_norm"), w), w, "dense_post_norm")
        experts = mixture(MOE, lambda _, own: top_k(2)(norm(x, w, "router_norm"), own))
        sparse = norm(experts(norm(x, w, "moe_norm"), in_scope(w, "moe.")), w, "moe_post_norm")
        return x + norm(dense + sparse, w, "post_norm")

    check(Row(dsl.SplitFeedForward(FFN, MOE), formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_per_layer_embedding(runner: str) -> None:
    module = dsl.PerLayerEmbedding(7, WIDTH)
    types = {"x": X, "ids": TensorType(dtypes.i64, X.shape[:2])}
    graph = dsl.trace(lambda x, ids: dict(zip(("first", "second"), module(x, ids, 2), strict=True)), types)
    rng = np.random.default_rng(0)
    w, x, ids = randomize(graph, rng), rng.standard_normal((2, 6, 16)), rng.integers(0, 10, (2, 6))
    w = {name.removeprefix("per_layer_embedding."): array for name, array in w.items()}
    table = w["table.weight"][np.where(ids < 7, ids, 0)].reshape(2, 6, 2, WIDTH) * math.sqrt(WIDTH)
    want = (norm(linear(x, w, "projection").reshape(table.shape) / 4, w, "norm") + table) / math.sqrt(2)
    for i, got in enumerate(run(graph, {"x": x, "ids": ids}, runner).values()):
        close(got, want[:, :, i], runner == "interpreter")


@dsl.module
class Streams:
    """A layer between the two maps of streams."""

    spread: dsl.SpreadStreams
    layer: dsl.AltUpLayer
    gather: dsl.GatherStreams

    def __call__(self, x: Value) -> Value:
        return self.gather(self.layer(self.spread(x)))


def scaled(y: Array, to: Array) -> Array:
    """Return y with the root mean square of `to`."""
    return y * np.sqrt((to**2).mean(-1, keepdims=True) / (y**2).mean(-1, keepdims=True))


def alt_up(streams: list[Array], embedding: Array, w: Weights) -> list[Array]:
    """Predict all streams, compute one of them, and correct all (Baykal 2023; Gemma 3n)."""

    def modalities(x: Array) -> Array:
        return np.tanh(linear(norm(x, w, "router_norm") / x.shape[1], w, "router"))

    mix = linear(modalities(streams[ACTIVE]), w, "prediction").reshape(-1, STREAMS, STREAMS)
    predicted = [x + sum(mix[:, i, j, None] * streams[j] for j in range(STREAMS)) for i, x in enumerate(streams)]
    x = predicted[ACTIVE]
    n = norm(x, w, "attn_norm")
    laurel = n + norm(linear(linear(n, w, "laurel_left"), w, "laurel_right"), w, "laurel_norm")
    y = (x + norm(attention(ATTN)(n, in_scope(w, "attn.")), w, "attn_post_norm") + laurel) / math.sqrt(2)
    y = y + norm(feed_forward(FFN, "ffn.")(norm(y, w, "ffn_norm"), w), w, "ffn_post_norm")
    gains = 1 + linear(modalities(y), w, "correction")
    corrected = [p + gains[:, i, None] * (y - x) for i, p in enumerate(predicted)]
    extra = per_layer_input(corrected[ACTIVE] * w["output_scale"], embedding, in_scope(w, "per_layer."))
    return [corrected[0], *(stream + extra for stream in corrected[1:])]


@pytest.mark.parametrize("runner", RUNNERS)
def test_alt_up(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        w = in_scope(w, "inner.")
        streams = [x, *(scaled(linear(x, w, f"spread.projections.{i}"), x) for i in range(STREAMS - 1))]
        first, *others = alt_up(streams, x[:, :WIDTH], in_scope(w, "layer."))
        back = (scaled(linear(y, w, f"gather.projections.{i}"), first) for i, y in enumerate(others))
        return sum(back, first) / STREAMS

    layer = dsl.AltUpLayer(ATTN, FFN, 3, dsl.PerLayerInput(WIDTH), active=ACTIVE)
    check(Row(WithEmbedding(Streams(dsl.SpreadStreams(STREAMS), layer, dsl.GatherStreams())), formula), runner)
