"""Predict whether ONNX Runtime's CUDA provider keeps a model on the GPU and captures it as a CUDA graph.

Also: f32 where it lacks a 16-bit kernel.

The provider takes a node if it has a kernel for its types. It then gives back to the CPU what computes only on shapes,
and the runtime copies values between the two where they meet. CUDA graphs are refused to a model with such a copy, and
replay no CPU node: so values computed on the CPU may come from shapes only, and may go only where a kernel reads host
memory. This module foresees that placement (`GetCpuPreferredNodes` of ONNX Runtime 1.31.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as onnx

from .cuda_kernels import KERNELS, Kernel
from .emitter import ONNX_DTYPES

if TYPE_CHECKING:
    import onnx as onnx_proto

_NAMES = {number: name for name, number in ONNX_DTYPES.items()}
# GetCpuPreferredNodes leaves every node that reads one of these types on the GPU.
_NEVER_ON_CPU = {"f16", "bf16", "f8e4m3", "f8e5m2"}
_SUBGRAPHS = (onnx.AttributeType.GRAPH, onnx.AttributeType.GRAPHS)
_SMALL = 100  # elements of an initializer that may follow a node to the CPU


def cuda_problems(model: onnx.Model | onnx_proto.ModelProto) -> list[str]:
    """List reasons why the CUDA provider would not run all of `model` on the GPU, or would not capture it; a sentence
    each.

    Foreseen are nodes without a kernel for their types, control flow, copies between host and device, and values read
    by the CPU, which a replayed graph would not see change. Shape arithmetic into host inputs is no problem.
    """
    graph = (model if isinstance(model, onnx.Model) else onnx.serde.deserialize_model(model)).graph
    types = _Types(graph)
    where = _Placement(graph, types)
    for node in graph:
        where.place(node)
    return where.problems


def widen(model: onnx.Model) -> list[str]:
    """Compute in f32, between casts, what has no CUDA kernel in bf16 or f16; a line per node changed, in place.

    ONNX Runtime cannot even open a bf16 model with such a node: its CPU provider lacks the kernel too.
    """
    lines = []
    types = _Types(model.graph)
    # A copy of the list: the loop inserts casts.
    for node in list(model.graph):
        kernel = _kernel(node)
        if kernel is None:
            continue
        bound = types.bind(node, kernel)
        narrow = {v: t for v, t in bound.items() if t in ("f16", "bf16") and not kernel.takes(v, t)}
        # Where f32 has no kernel either a cast is no help: `cuda_problems` reports the node.
        narrow = {v: t for v, t in narrow.items() if kernel.takes(v, "f32")}
        if narrow:
            _compute_in_f32(model.graph, node, kernel, narrow)
            lines.append(
                f"{node.name}: {node.op_type} has no {' or '.join(sorted(set(narrow.values())))} kernel: in f32"
            )
    return lines


def _compute_in_f32(graph: onnx.Graph, node: onnx.Node, kernel: Kernel, narrow: dict[str, str]) -> None:
    wide = onnx.TensorType(ONNX_DTYPES["f32"])
    for i, value in enumerate(node.inputs):
        if value is not None and kernel.input(i) in narrow:
            cast = _cast(f"{node.name}.in{i}", value, "f32")
            node.replace_input_with(i, cast.outputs[0])
            graph.insert_before(node, cast)
    for i, value in enumerate(node.outputs):
        if value.name and kernel.output(i) in narrow:
            cast = _cast(f"{node.name}.out{i}", value, narrow[kernel.output(i)])
            result = cast.outputs[0]
            value.replace_all_uses_with(result, replace_graph_outputs=True)
            # The call above made the cast read its own result, too.
            cast.replace_input_with(0, value)
            # A graph output is known by its name, which therefore moves to the cast.
            result.name, value.name = value.name, result.name
            value.type = wide
            graph.insert_after(node, cast)


def _cast(name: str, value: onnx.Value, dtype: str) -> onnx.Node:
    number = ONNX_DTYPES[dtype]
    out = onnx.Value(name=f"{name}.cast", shape=value.shape, type=onnx.TensorType(number))
    return onnx.Node("", "Cast", [value], {"to": onnx.AttrInt64("to", int(number))}, outputs=[out], name=name)


def _kernel(node: onnx.Node) -> Kernel | None:
    return KERNELS.get((node.domain, node.op_type))


class _Types:
    """Element types of the values of a graph, by weft's names: what is not declared follows from the kernels."""

    def __init__(self, graph: onnx.Graph) -> None:
        self._known: dict[onnx.Value, str] = {}
        for node in graph:
            kernel = _kernel(node)
            bound = {} if kernel is None else self.bind(node, kernel)
            for i, value in enumerate(node.outputs):
                name = "" if kernel is None else kernel.output(i)
                dtype = bound.get(name) or (None if kernel is None or name in kernel.types else name)
                if dtype and value.dtype is None:
                    self._known[value] = dtype

    def __getitem__(self, value: onnx.Value) -> str | None:
        return self._known.get(value) if value.dtype is None else _NAMES.get(value.dtype, str(value.dtype))

    def bind(self, node: onnx.Node, kernel: Kernel) -> dict[str, str]:
        """The type of each variable of the kernel at `node`, where it is known."""
        bound: dict[str, str] = {}
        if "to" in node.attributes:
            bound["to"] = _NAMES[onnx.DataType(node.attributes["to"].as_int())]
        if node.op_type == "ConstantOfShape":
            value = node.attributes.get("value")
            # Without a value the operator fills with f32 zeros (ONNX).
            bound["value"] = "f32" if value is None else _NAMES[value.as_tensor().dtype]
        for i, operand in enumerate(node.inputs):
            if operand is not None and (dtype := self[operand]) is not None:
                bound.setdefault(kernel.input(i), dtype)
        return bound


class _Placement:
    """Placement of nodes and values by ONNX Runtime; `problems` lists its defects."""

    def __init__(self, graph: onnx.Graph, types: _Types) -> None:
        self.types = types
        self.inputs = set(graph.inputs)
        self.host: set[onnx.Value] = set()  # computed on the CPU
        self.fixed: set[onnx.Value] = set(graph.initializers.values())  # and what is folded from them
        self.problems: list[str] = []

    def place(self, node: onnx.Node) -> None:
        """Place `node`, whose inputs are placed."""
        if any(a.type in _SUBGRAPHS for a in node.attributes.values()):
            self._problem(node, "control flow runs on the CPU")
            return
        kernel = _kernel(node)
        if kernel is None:
            self._problem(node, "the CUDA provider is not known to have this operator")
            return
        bound = self.types.bind(node, kernel)
        lacking = sorted({t for v, t in bound.items() if not kernel.takes(v, t)})
        if lacking:
            self._problem(node, f"there is no CUDA kernel for {', '.join(lacking)}")
        # Constants are folded before nodes get a device, so what disappears then needs none.
        elif self._folded(node):
            self.fixed.update(node.outputs)
        elif node.op_type in ("Shape", "Size"):
            self.host.update(node.outputs)
        elif self._follows_to_cpu(node, kernel):
            self.host.update(node.outputs)
            for value in self.inputs.intersection(node.inputs):
                self._problem(node, f"it runs on the CPU, so a CUDA graph would not see input {value.name} change")
        else:
            self._cross(node, kernel)

    def _folded(self, node: onnx.Node) -> bool:
        """Return whether ONNX Runtime folds `node` into a constant when it loads the model."""
        if node.op_type == "Shape" and (operand := node.inputs[0]) is not None and operand.shape is not None:
            return operand.shape.is_static()
        return all(value is None or value in self.fixed for value in node.inputs)

    def _follows_to_cpu(self, node: onnx.Node, kernel: Kernel) -> bool:
        """ONNX Runtime's rule: some input is on the host, and all that are not small stay there for another kernel."""

        def may_follow(i: int, value: onnx.Value) -> bool:
            if self.types[value] in _NEVER_ON_CPU:
                return False
            free = value in self.inputs or (value in self.fixed and _elements(value) <= _SMALL)
            return free or (value in self.host and i not in kernel.host)

        operands = [(i, value) for i, value in enumerate(node.inputs) if value is not None]
        return any(v in self.host for _, v in operands) and all(may_follow(i, v) for i, v in operands)

    def _cross(self, node: onnx.Node, kernel: Kernel) -> None:
        for i, value in enumerate(node.inputs):
            if value is None or value in self.fixed:
                continue
            if i not in kernel.host and value in self.host:
                self._problem(node, f"{value.name} is computed from shapes on the CPU but needed on the GPU")
            elif i in kernel.host and value in self.inputs:
                self._problem(node, f"input {value.name} is read on the CPU, so a CUDA graph would not see it change")
            elif i in kernel.host and value not in self.host:
                self._problem(node, f"{value.name} is computed on the GPU but needed on the CPU")

    def _problem(self, node: onnx.Node, text: str) -> None:
        self.problems.append(f"{node.op_type} {node.name or node.outputs[0].name}: {text}")


def _elements(value: onnx.Value) -> int:
    """Elements of an initializer; one that is folded from others is taken to be small."""
    shape = value.shape
    return 1 if shape is None else math.prod(size if isinstance(size, int) else 1 for size in shape)
