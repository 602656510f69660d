"""ONNX models with nodes, types, functions and constants that are wrong somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from . import mutations


def mutated_onnx(rng: random.Random, data: bytes) -> bytes:
    """The model `data` with one to three changes; or any bytes changed."""
    if rng.random() < 0.1:
        return mutations.raw_bytes(rng, data)
    model = onnx.ModelProto()
    model.ParseFromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, model)
    return bytes(model.SerializeToString())


NAMES = (
    "", " ", "/", "//", ".", "..", "a/../b", "\x00", "\n", "\x1b[31m", "\u202e", "💥",
    "é" * 500, "a" * 70_000, "layers.0", "/" * 3000,
    "layers.99999999999999999999/x", "layer." * 2000, "<script>", "%s{}", "'\"`", "{{ x }}", "None", "def",
    "block/0/0/0", "x.weight",
)  # fmt: skip


def named_onnx(rng: random.Random, data: bytes) -> bytes:
    """The model `data` with other names for nodes, values, initializers, domains, functions, sizes and files."""
    model = onnx.ModelProto()
    model.ParseFromString(data)
    graph = model.graph
    for _ in range(rng.choice((1, 2, 10))):
        name, node = rng.choice(NAMES), _node(rng, model)
        what = rng.randrange(10)
        if what == 0:
            node.name = name
        elif what == 1 and node.output:  # everywhere, so that the model stays sound
            old = rng.choice(node.output)
            for other in graph.node:
                for names in (other.input, other.output):
                    for i in (i for i, known in enumerate(names) if known == old):
                        names[i] = name
        elif what == 2:
            node.domain = name
        elif what == 3:
            node.op_type = name
        elif what == 4 and graph.initializer:
            rng.choice(graph.initializer).name = name
        elif what == 5:
            graph.name = model.producer_name = model.domain = name
        elif what == 6 and graph.input:
            rng.choice(graph.input).name = name
        elif what == 7:
            node.metadata_props.add(key=rng.choice(("pkg.torch.onnx.name_scopes", "namespace", name)), value=name)
        elif what == 8 and graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.external_data.add(key=rng.choice(("location", "offset", "length", name)), value=name)
            tensor.data_location = rng.choice((TensorProto.EXTERNAL, TensorProto.DEFAULT))
        else:
            for value in graph.input:
                for dim in value.type.tensor_type.shape.dim:
                    dim.dim_param = name
    if rng.random() < 0.3:  # the same name for many
        for node in graph.node:
            node.name = rng.choice(NAMES[:3])
    changed = bytes(model.SerializeToString())
    return changed.replace(b"layers", bytes([0xFF, 0xFE]) * 3) if rng.random() < 0.1 else changed


def _node(rng: random.Random, model: onnx.ModelProto) -> onnx.NodeProto:
    if not model.graph.node:
        model.graph.node.append(helper.make_node("Identity", ["x"], ["y"]))
    return rng.choice(model.graph.node)


def _versions(rng: random.Random, model: onnx.ModelProto) -> None:
    for opset in model.opset_import:
        opset.version = rng.choice((0, -1, 1, 7, 21, 1000, 2**31 - 1, 2**31, 2**40, 2**63 - 1))
    if rng.random() < 0.2:
        model.ir_version = rng.choice((0, 1, 99, 2**62))
    if rng.random() < 0.2:
        model.opset_import.append(helper.make_opsetid(rng.choice(("", "x", "com.microsoft", "ai.onnx")), 2**40))


def _operator(rng: random.Random, model: onnx.ModelProto) -> None:
    kinds = (
        "Reshape",
        "Gather",
        "Concat",
        "Constant",
        "Shape",
        "Slice",
        "If",
        "Loop",
        "MatMulNBits",
        "Squeeze",
        "",
        "é",
    )
    _node(rng, model).op_type = rng.choice(kinds)


def _inputs(rng: random.Random, model: onnx.ModelProto) -> None:
    node, other = _node(rng, model), _node(rng, model)
    names = [*other.output, *other.input, "", "nothing"]
    what = rng.randrange(4)
    if what == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif what == 1:
        node.input.append(rng.choice(names))
    elif what == 2:
        del node.input[:]
    elif node.output:
        node.output[0] = rng.choice(names)


def _outputs(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    if rng.random() < 0.5:
        del node.output[:]
    else:
        node.output.extend(["a", "a", ""])


def _attributes(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    if node.attribute and rng.random() < 0.5:
        attribute = rng.choice(node.attribute)
        what = rng.randrange(4)
        if what == 0:
            attribute.type = rng.choice(list(range(15)))
        elif what == 1:
            attribute.name = rng.choice(("axis", "value", "to", "", "value_ints"))
        elif what == 2:
            node.attribute.append(attribute)
        else:
            attribute.i = rng.choice((-1, 2**40, 2**63 - 1))
        return
    values = (5, -1, 2**62, 0.5, "x", [1, 2], ["a"], [0.5], helper.make_tensor("t", TensorProto.FLOAT, [2], [1.0, 2.0]))
    node.attribute.append(
        helper.make_attribute(rng.choice(("axis", "value", "perm", "start", "x")), rng.choice(values))
    )


def _tensors(rng: random.Random, model: onnx.ModelProto) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    what = rng.randrange(6)
    if what == 0:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice(([], [-1], [0], [2**62], [2**40, 2**40], [3] * 40, [7])))
    elif what == 1:
        tensor.data_type = rng.choice((0, 2, 7, 8, 10, 16, 22, 99, -5))
    elif what == 2:
        tensor.raw_data = b"\xff" * rng.randrange(20)
        tensor.data_location = TensorProto.DEFAULT
    elif what == 3:
        tensor.name = rng.choice(("", "input_ids", model.graph.initializer[0].name))
    elif what == 4:
        tensor.external_data.add(key="location", value="../../etc/passwd")
    else:
        model.graph.sparse_initializer.add().dims.extend([2**40])


def _types(rng: random.Random, model: onnx.ModelProto) -> None:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if not values:
        return
    value = rng.choice(values)
    what = rng.randrange(4)
    if what == 0:
        value.type.tensor_type.elem_type = rng.choice((0, 8, 99, -1))
    elif what == 1:
        value.type.Clear()
    elif what == 2:
        value.name = rng.choice(("", "x", "logits"))
    else:
        value.type.tensor_type.shape.dim.add().dim_value = rng.choice((-1, 0, 2**62))


def _functions(rng: random.Random, model: onnx.ModelProto) -> None:
    """Functions that call each other: many times over, or in a circle."""
    deep, calls = rng.choice(((9, 10), (70, 1), (3, 2), (30, 2), (2, 400)))
    for i in range(deep):
        inner = "Identity" if i == deep - 1 else f"f{i + 1}"
        if i == deep - 1 and rng.random() < 0.3:
            inner = "f0"
        domain = "" if inner == "Identity" else "own"
        nodes = [
            helper.make_node(inner, ["a" if k == 0 else f"v{k}"], [f"v{k + 1}"], domain=domain) for k in range(calls)
        ]
        nodes.append(helper.make_node("Identity", [f"v{calls}"], ["b"]))
        model.functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], nodes, [helper.make_opsetid("", 21)]))
    model.graph.node.append(helper.make_node("f0", [model.graph.input[0].name], ["deep"], domain="own"))


def _nested(rng: random.Random, model: onnx.ModelProto) -> None:
    """Graphs in attributes, in each other."""
    graph = helper.make_graph([helper.make_node("Identity", ["c"], ["d"])], "g", [], [])
    for _ in range(rng.choice((1, 10, 30))):
        graph = helper.make_graph([helper.make_node("If", ["c"], ["d"], then_branch=graph)], "g", [], [])
    model.graph.node.append(helper.make_node("If", [model.graph.input[0].name], ["branch"], then_branch=graph))


def _scopes(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    node.name = rng.choice(
        ("/".join("ab" * 500), "layer_" + "9" * 5000, "a" * 5000, "\x1b[2J", "/", "layer_0", "x.0.y")
    )
    values = ("[" * 5000, "['', 'a.0', 'b']", "9" * 5000, "x: Y/z: W", "[1]", "-" * 9000, "{" * 300)
    node.metadata_props.add(key=rng.choice(("pkg.torch.onnx.name_scopes", "namespace")), value=rng.choice(values))


def _removed(rng: random.Random, model: onnx.ModelProto) -> None:
    what = rng.randrange(4)
    if what == 0 and model.graph.node:
        del model.graph.node[rng.randrange(len(model.graph.node))]
    elif what == 1:
        del model.graph.output[:]
    elif what == 2:
        del model.graph.input[:1]
    else:
        model.graph.node.append(_node(rng, model))


CHANGES: tuple[Callable[[random.Random, onnx.ModelProto], None], ...] = (
    _versions, _operator, _inputs, _outputs, _attributes, _tensors, _types, _functions, _nested, _scopes, _removed,
)  # fmt: skip
