"""Edits of a graph, an ONNX file or a module, each of which makes one fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
import transformers

from weft.ir import ops
from weft.ir.graph import Graph
from weft.ir.recipes import Literal

Array = np.ndarray[Any, Any]
Change = Callable[[Array], Array]

# -- changes of a graph


def set_attrs(value: str, **attrs: Any) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        find_node(graph, value).attrs.update(attrs)

    return inject


def find_node(graph: Graph, value: str) -> Any:
    return next(n for n in graph.nodes if value in [v.name for v in n.outputs])


def set_param(name: str, change: Change) -> Callable[[Graph], None]:
    """Change a parameter; `change` may also return another parameter of the graph, by its name."""

    def inject(graph: Graph) -> None:
        param = graph.params[name]
        new = np.asarray(change(np.asarray(param.recipe.evaluate(graph.reader), np.float32)), np.float32)
        param.recipe = Literal(tuple(new.reshape(-1).tolist()), new.shape)

    return inject


def exchange_params(*names: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        a, b = (graph.params[name] for name in names)
        a.recipe, b.recipe = b.recipe, a.recipe

    return inject


def copy_param(name: str, other: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        graph.params[name].recipe = graph.params[other].recipe

    return inject


def leave_out(value: str, operand: int = 0) -> Callable[[Graph], None]:
    """Let the readers of `value` read an operand of its node instead."""

    def inject(graph: Graph) -> None:
        node = find_node(graph, value)
        node.outputs[0].replace_uses(node.inputs[operand])

    return inject


def set_operand(value: str, operand: int, other: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        known = {v.name: v for n in graph.nodes for v in n.outputs} | dict(graph.params) | dict(graph.inputs)
        find_node(graph, value).set_input(operand, known[other])

    return inject


def shift_positions(value: str) -> Callable[[Graph], None]:
    """Let the node of `value` read the next position."""

    def inject(graph: Graph) -> None:
        node, at = find_node(graph, value), graph.inputs["position_ids"]
        with graph.inserting(before=node):
            node.set_input(node.inputs.index(at), ops.add(at, 1, name="next"))

    return inject


# -- changes of an ONNX file and of a module


def edit_onnx(folder: Path, out: Path, edit: Callable[[onnx.ModelProto], None], file: str = "model.onnx") -> Path:
    """Write a copy of the compiled folder, with `file` changed by `edit`."""
    shutil.copytree(folder, out)
    model = onnx.load(out / file)
    edit(model)
    onnx.save(model, out / file)
    return out


def set_attribute(value: str, name: str, new: Any) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if value in n.output)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, new)])

    return edit


def set_initializer(name: str, change: Change) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        new = np.ascontiguousarray(change(onnx.numpy_helper.to_array(tensor)), np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(new, name))

    return edit


def set_node_input(value: str, index: int, other: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if value in n.output).input[index] = other

    return edit


def replace_op(value: str, op: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if value in n.output).op_type = op

    return edit


def set_parameter(name: str, change: Change) -> Callable[[torch.nn.Module], None]:
    def inject(module: torch.nn.Module) -> None:
        parameter = module.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(change(parameter.numpy().copy()), np.float32)))

    return inject


def set_field(path: str, field: str, value: Any) -> Callable[[torch.nn.Module], None]:
    return lambda module: setattr(module.get_submodule(path), field, value)


def set_activation(path: str, field: str, name: str) -> Callable[[torch.nn.Module], None]:
    return lambda module: setattr(module.get_submodule(path), field, transformers.activations.ACT2FN[name])


# -- changes of a weight


def bf16(w: Array) -> Array:
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


def int8(w: Array) -> Array:
    scale = np.abs(w).max(-1, keepdims=True) / 127
    return np.asarray(np.round(w / scale) * scale)


def zero_row(w: Array) -> Array:
    w = w.copy()
    w[3] = 0
    return w


def spoil_element(w: Array) -> Array:
    w = w.copy()
    w[2, 5] += 0.5
    return w


def double_column(w: Array) -> Array:
    w = w.copy()
    w[:, 5] *= 2
    return w


def scale(factor: float) -> Change:
    return lambda w: w * factor


def permute_heads(heads: int, order: Sequence[int], axis: int = 0) -> Change:
    def change(w: Array) -> Array:
        w = np.moveaxis(w, axis, 0)
        return np.moveaxis(w.reshape(heads, -1, *w.shape[1:])[list(order)].reshape(w.shape), 0, axis)

    return change


def interleave(heads: int) -> Change:
    """Move the two halves of the rows of each head between each other, as llama.cpp stores them."""
    return lambda w: w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def transpose(w: Array) -> Array:
    return w.T


def drop(w: Array) -> Array:
    return np.zeros_like(w)


def rope_base(theta: float) -> Change:
    return lambda f: theta ** -(np.arange(f.size) / f.size)


ROUNDING, OTHER, MISSING = ("rounding",), ("other weight",), ("missing operation", "missing operand")
