"""Decoders of one attention, run through ONNX Runtime in place, and a float64 formula to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, Param, TensorType, Value, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes, sizes
from weft.passes import legalize, run_passes

BATCH, SEQ = sizes.sym("batch"), sizes.sym("seq")
HEADS, KV_HEADS, DIM = 4, 2, 8
SLOPES = 0.5 ** np.arange(1, HEADS + 1)
Array = np.ndarray[Any, Any]
KeyVisibility = Callable[[Array, Array], Array]  # of query and key positions


def decoder(
    bias: Callable[[Graph, Value], Value] | None = None, *, sinks: Array | None = None, v: bool = True, **attrs: Any
) -> Graph:
    """Return a graph of causal attention: y [batch, seq, heads·d] from q, k and v (without v: `value_dim` of each
    key)."""
    graph = Graph("one", MemoryReader({} if sinks is None else {"sinks": sinks}))
    graph.meta["kind"] = "decoder"
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "causal": True, **attrs}
    widths = {"q": shape["heads"] * DIM, "k": shape["kv_heads"] * DIM, "v": shape["kv_heads"] * DIM if v else 0}
    q, k, *rest = (
        graph.add_input(name, TensorType(dtypes.f32, (BATCH, SEQ, width))) for name, width in widths.items() if width
    )
    extra = None if sinks is None else graph.add_param("sinks", TensorType(dtypes.f32, sinks.shape), Source("sinks"))
    added = None if bias is None else bias(graph, q)
    graph.add_output("y", ops.attention(q, k, rest[0] if rest else None, added, None, extra, **shape))
    return graph


def draw(rng: np.random.Generator, graph: Graph, batch: int, length: int) -> dict[str, Array]:
    """Return random q, k and v of `length` tokens."""
    return {n: rng.standard_normal((batch, length, graph.inputs[n].width)) for n in "qkv" if n in graph.inputs}


def formula(
    inputs: dict[str, Array],
    seen: KeyVisibility,
    *,
    kv_heads: int = KV_HEADS,
    value_dim: int | None = None,
    bias: Array | float = 0.0,
    sinks: Array | None = None,
    softcap: float | None = None,
    causal: bool = True,
    dim: int = DIM,
) -> Array:
    """Compute attention of all tokens at once, one query and head at a time."""
    q, k = inputs["q"], inputs["k"]
    batch, length, width = q.shape
    heads = width // dim
    v = inputs["v"].reshape(batch, length, kv_heads, dim) if "v" in inputs else None
    k = k.reshape(batch, length, kv_heads, dim)
    v = k[..., :value_dim] if v is None else v
    biases = np.broadcast_to(bias, (batch, heads, length, length))
    y = np.zeros((batch, length, heads, v.shape[-1]))
    every = np.arange(length)
    for b, i, h in np.ndindex(batch, length, heads):
        keys = every[seen(np.array(i), every) & ((every <= i) | (not causal))]
        group = h * kv_heads // heads
        scores = k[b, keys, group] @ q[b, i, h * dim : (h + 1) * dim] / np.sqrt(dim)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores + biases[b, h, i, keys])
        weights /= weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        y[b, i, h] = weights @ v[b, keys, group]
    return y.reshape(batch, length, -1)


class Decoding:
    """An open session of a decoder with caches that start as noise; past and present are one memory."""

    def __init__(self, graph: Graph, target: str, batch: int, capacity: int, passes: str = "kv-cache") -> None:
        place = TARGETS[target]
        self.graph = run_passes(graph, passes)
        legalize(self.graph, lambda node: list_refusals(node, place))
        built = build_model(self.graph, place, max_length=64)
        self.ops = [n.op_type for n in built.model.graph]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(serialize_model(built), options, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(3)
        self.caches = {}
        for given in self.session.get_inputs():
            if given.name.startswith("past_key_values."):
                shape = [batch, given.shape[1], given.shape[2], given.shape[3]]
                shape[2] = shape[2] if isinstance(shape[2], int) else capacity
                kind = {"tensor(int8)": np.int8, "tensor(uint8)": np.uint8}.get(given.type, np.float32)
                self.caches[given.name] = (100 * rng.random(shape)).astype(kind)
        self.wanted = {i.name for i in self.session.get_inputs()}

    def call(self, inputs: dict[str, Array], at: Array, mask: Array, rows: slice = slice(None)) -> Array:
        """Return y of one call: the tokens of `inputs` at positions `at` [batch, seq], in the `rows` of the caches."""
        feeds = {k: v.astype(np.float32) for k, v in inputs.items()}
        feeds |= {"position_ids": at.astype(np.int64), "attention_mask": mask.astype(np.int64)}
        binding = self.session.io_binding()
        for name in self.wanted & feeds.keys():
            binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        for name, whole in self.caches.items():
            cache = whole[rows]
            place = (cache.shape, cache.ctypes.data)
            binding.bind_input(name, "cpu", 0, whole.dtype, *place)
            binding.bind_output(name.replace("past_key_values", "present"), "cpu", 0, whole.dtype, *place)
        binding.bind_output("y")
        self.session.run_with_iobinding(binding)
        names = [o.name for o in self.session.get_outputs()]
        bound = [*(n for n in names if n != "y"), "y"]
        found: Array = dict(zip(bound, binding.copy_outputs_to_cpu(), strict=True))["y"]
        return found

    def chunks(self, inputs: dict[str, Array], cuts: Sequence[int]) -> Array:
        """Return y of all tokens, in calls of `cuts` tokens."""
        batch = len(inputs["q"])
        found, start = [], 0
        for n in cuts:
            part = {k: v[:, start : start + n] for k, v in inputs.items()}
            at = np.tile(np.arange(start, start + n), (batch, 1))
            found.append(self.call(part, at, np.ones((batch, start + n))))
            start += n
        return np.concatenate(found, 1)


def positions(graph: Graph) -> Value:
    return graph.inputs.get("position_ids") or graph.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))


def weight(graph: Graph, name: str, array: Array) -> Param:
    graph.reader.arrays[name] = array
    return graph.add_param(name, TensorType(dtypes.f32, array.shape), Source(name))


def alibi(graph: Graph, q: Value) -> Value:
    return ops.alibi(weight(graph, "slopes", SLOPES), positions(graph), positions(graph))
