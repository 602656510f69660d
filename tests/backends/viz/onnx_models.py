"""ONNX models as exporters write them: the same decoder with the names that each gives, or none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, DIM, HIDDEN = 17, 8, 12
PER_LAYER = 16  # operations that are drawn, of a layer

Name = Callable[[tuple[str, ...], str, int], str]  # of a node: by its modules, its operator, and how many came before


class Builder:
    """Nodes and initializers of a graph; `name` says what a node in some modules is called."""

    def __init__(self, name: Name, metadata: bool = False) -> None:
        self.name, self.metadata = name, metadata
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def op(self, modules: str, kind: str, *inputs: str, domain: str = "", **attrs: object) -> str:
        """A node in the module of that path, with one result, whose name is returned."""
        path = tuple(modules.split(".")) if modules else ()
        i = len(self.nodes)
        name = self.name(path, kind, i)
        out = f"{name}_output_0" if name else str(100 + i)
        node = helper.make_node(kind, list(inputs), [out], name=name, domain=domain, **attrs)
        if self.metadata:
            scopes = ["", *(".".join(path[: k + 1]) for k in range(len(path))), f"{kind.lower()}_{i}"]
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
        self.nodes.append(node)
        return out

    def weight(self, name: str, *shape: int) -> str:
        """An initializer of that name."""
        self.weights.append(numpy_helper.from_array(self.rng.standard_normal(shape).astype(np.float32), name))
        return name

    def constant(self, modules: str, value: object) -> str:
        """The result of a Constant node."""
        return self.op(modules, "Constant", value=numpy_helper.from_array(np.asarray(value, np.int64)))

    def linear(self, modules: str, x: str, width: int, out: int) -> str:
        """A linear map with a bias, as PyTorch's exporter writes it: its weight transposed, without a name of use."""
        y = self.op(modules, "MatMul", x, self.weight(f"onnx::MatMul_{len(self.nodes)}", width, out))
        return self.op(modules, "Add", self.weight(f"{modules}.bias", out), y)

    def layer(self, at: str, x: str) -> str:
        """Attention and a feed-forward network, in the operations of an exporter that knows no attention."""
        h = self.op(f"{at}.norm", "LayerNormalization", x, self.weight(f"{at}.norm.weight", DIM), axis=-1)
        q, k, v = (self.linear(f"{at}.attn.{n}", h, DIM, DIM) for n in "qkv")
        shape = self.op(f"{at}.attn", "Shape", q)
        batch = self.op(f"{at}.attn", "Gather", shape, self.constant(f"{at}.attn", 0), axis=0)
        batch = self.op(f"{at}.attn", "Unsqueeze", batch, self.constant(f"{at}.attn", [0]))
        sizes = self.op(
            f"{at}.attn", "Concat", batch, self.constant(f"{at}.attn", [-1]), self.constant(f"{at}.attn", [DIM]), axis=0
        )
        q = self.op(f"{at}.attn", "Reshape", q, sizes)
        scores = self.op(f"{at}.attn", "MatMul", q, self.op(f"{at}.attn", "Transpose", k, perm=[0, 2, 1]))
        chosen = self.op(f"{at}.attn", "MatMul", self.op(f"{at}.attn", "Softmax", scores, axis=-1), v)
        x = self.op(at, "Add", x, self.linear(f"{at}.attn.o", chosen, DIM, DIM))
        up = self.linear(f"{at}.ffn.up", x, DIM, HIDDEN)
        down = self.linear(f"{at}.ffn.down", self.op(f"{at}.ffn", "Gelu", up), HIDDEN, DIM)
        return self.op(at, "Add", x, down)

    def model(self, layers: int) -> onnx.ModelProto:
        """The decoder."""
        x = self.op("embed", "Gather", self.weight("embed.weight", VOCAB, DIM), "input_ids")
        for i in range(layers):
            x = self.layer(f"layers.{i}", x)
        x = self.op("norm", "LayerNormalization", x, self.weight("norm.weight", DIM), axis=-1)
        x = self.op("head", "MatMul", x, self.weight("head.weight", DIM, VOCAB))
        return wrapped(
            self.nodes,
            [("input_ids", TensorProto.INT64, ["batch", "seq"])],
            [(x, TensorProto.FLOAT, ["batch", "seq", VOCAB])],
            self.weights,
        )


def wrapped(
    nodes: list[onnx.NodeProto],
    inputs: list[tuple[str, int, list[str | int]]],
    outputs: list[tuple[str, int, list[str | int]]],
    weights: list[onnx.TensorProto] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> onnx.ModelProto:
    """A model of these nodes."""
    taken, given = ([helper.make_tensor_value_info(*v) for v in found] for found in (inputs, outputs))
    graph = helper.make_graph(nodes, "main_graph", taken, given, weights or [])
    domains = [("", 20), ("com.microsoft", 1), *((f.domain, 1) for f in functions or [])]
    opsets = [helper.make_opsetid(*domain) for domain in dict(domains).items()]
    return helper.make_model(graph, opset_imports=opsets, functions=functions or [])


def slashed(path: tuple[str, ...], kind: str, i: int) -> str:
    """As PyTorch's exporter by tracing: /layers.0/attn/q/MatMul."""
    return "/" + "/".join([*_lists(path), f"{kind}_{i}"])


def dotted(path: tuple[str, ...], kind: str, i: int) -> str:
    """As weft: layers.0.attn.q.MatMul."""
    return ".".join([*path, f"{kind}_{i}"])


def wrapped_in_model(path: tuple[str, ...], kind: str, i: int) -> str:
    """As onnxruntime-genai: /model/layers.0/attn/q/MatMul, /lm_head/MatMul."""
    return slashed(path if path == ("head",) else ("model", *path), kind, i)


def tensorflow(path: tuple[str, ...], kind: str, i: int) -> str:
    """As tf2onnx: net/layer_._0/attn/q/MatMul."""
    words = [f"layer_._{w}" if w.isdigit() else w for w in path if w != "layers"]
    return "/".join(["net", *words, f"{kind}_{i}"])


def plain(path: tuple[str, ...], kind: str, i: int) -> str:
    """Of no use: MatMul_17."""
    return f"{kind}_{i}"


def nameless(path: tuple[str, ...], kind: str, i: int) -> str:
    """Nothing."""
    return ""


def _lists(path: tuple[str, ...]) -> list[str]:
    """Words, numbers after a dot."""
    return ".".join(path).replace(".", "/").replace("layers/", "layers.").split("/")
