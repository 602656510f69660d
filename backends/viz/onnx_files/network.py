"""Any ONNX file as a network: its operations with the scopes that its exporter tells, weights and types.

Data outside of the file is not read. Functions are opened where they are called. Constants, and what is computed from
shapes alone, are no operations of their own but stand among the attributes of what reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from weft.ir.errors import WeftError
from weft.ir.types.block_layouts import INTEGER_BITS, integer_layout

from ..model.network import Network, Vertex, Weight, in_words
from .constants import Constant, constant, copied, formula, initializer
from .operation import Op
from .operators import MICROSOFT, OPERANDS, PACKED, VIEWS, alike, gates
from .scopes import exported_scope, fresh, named
from .types import described, dtype_name, type_text

BIG = 1 << 10  # bytes of a weight that is no part of a shape
DEEPEST = 64  # functions in functions
MOST = 30_000  # operations in calls of functions; exporters make a few of each function
NEWEST = 1 << 16  # version of operators, which is 25 today


def onnx_network(path: Path) -> Network:
    """Read the ONNX model at `path` as a network to draw.

    Raises:
        WeftError: if that is no ONNX model, or not a whole one.
    """
    model = _read(path)
    graph, ops = model.graph, list(_ops(model, path))
    constants = {tensor.name: initializer(tensor) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        constants[sparse.values.name] = Constant(dtype_name(sparse.values.data_type), tuple(sparse.dims), None)
    inputs = {v.name: type_text(v.type) for v in graph.input if v.name not in constants}
    types = {v.name: type_text(v.type) for v in _typed(model)}
    outputs = {v.name: (v.name, types.get(v.name, "")) for v in graph.output}
    ops = _without_sizes(ops, constants, types, outputs.keys())
    _check(path, ops, {*inputs, *constants}, outputs)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    vertices, renamed = _vertices(ops, constants, types, versions)
    return Network(
        graph.name if graph.name not in ("", "main_graph", "main", "torch_jit", "torch-jit-export") else path.stem,
        tuple(vertices),
        inputs,
        {name: (renamed.get(value, value), kind) for name, (value, kind) in outputs.items()},
    )


def joined(halves: Sequence[Network]) -> Network:
    """Models of which later ones take what earlier ones give, by the same names, as one."""
    whole = halves[0]
    for part in halves[1:]:
        part = _apart(part, {v.name for v in whole.vertices})
        joints = {name: value for name, (value, _) in whole.outputs.items() if name in part.inputs}
        vertices = (replace(v, reads=tuple(joints.get(x, x) for x in v.reads)) for v in part.vertices)
        inputs = {**whole.inputs, **{name: kind for name, kind in part.inputs.items() if name not in joints}}
        outputs = {name: output for name, output in whole.outputs.items() if name not in joints}
        whole = Network(part.name, _merged(whole.vertices, [*vertices]), inputs, {**outputs, **part.outputs})
    return whole


def _merged(before: Sequence[Vertex], after: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """The operations of two halves, those of the first that belong to a part of the second where that reads them."""
    shared = {v.scope.partition(".")[0] for v in after if v.scope}
    first: dict[str, int] = {}
    # Backwards, so that the first reader of a value is the one that stays.
    for i, v in reversed([*enumerate(after)]):
        first |= dict.fromkeys(v.reads, i)
    late: dict[str, int] = {}
    for v in reversed(before):
        places = [first[x] for x in v.makes if x in first]
        if places and v.scope.partition(".")[0] in shared:
            late[v.name] = min(places)
            for x in v.reads:
                first[x] = min(late[v.name], first.get(x, len(after)))
    order = [v for v in before if v.name not in late]
    for i, v in enumerate(after):
        order += [w for w in before if late.get(w.name) == i]
        order.append(v)
    return tuple(order)


def _apart(network: Network, taken: set[str]) -> Network:
    """`network`, none of its operations with a name that is taken."""
    names: dict[str, str] = {}
    vertices = []
    for v in network.vertices:
        name = fresh(v.name, taken)
        names |= {x: name + x.removeprefix(v.name) for x in v.makes if name != v.name}
        reads, makes = (tuple(names.get(x, x) for x in values) for values in (v.reads, v.makes))
        vertices.append(replace(v, name=name, reads=reads, makes=makes))
    outputs = {name: (names.get(value, value), kind) for name, (value, kind) in network.outputs.items()}
    return replace(network, vertices=tuple(vertices), outputs=outputs)


# -- the file


def _read(path: Path) -> onnx.ModelProto:
    """The model in the file, without the data that are outside of it."""
    model = onnx.ModelProto()
    try:
        with path.open("rb") as file:
            model.ParseFromString(file.read())
    except OSError as e:
        raise WeftError(f"cannot read {path}: {(e.strerror or str(e)).lower()}") from e
    except DecodeError as e:
        raise WeftError(f"{path} is not a valid ONNX model, or is truncated: {e}") from e
    if wrong := next((o for o in model.opset_import if not 0 <= o.version <= NEWEST), None):
        raise WeftError(f"{path}: operators of {wrong.domain or 'ai.onnx'} have no version {wrong.version}")
    if not model.ir_version or not (model.graph.node or model.graph.output):
        raise WeftError(f"{path} is not a valid ONNX model, or is truncated: it contains no graph")
    return model


def _typed(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Every value whose type is known: by the file, or by the rules of its operators."""
    light = onnx.ModelProto()
    # infer_shapes takes the model as one protobuf message, of at most 2 GiB.
    light.CopyFrom(_light(model))
    try:
        light = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError):
        light = model  # the types in the file are those that are known
    yield from (*light.graph.value_info, *light.graph.input, *light.graph.output)


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` without the bytes of its weights, which no shape depends on."""
    stub = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = model.graph
    stub.graph.MergeFrom(
        onnx.GraphProto(
            node=graph.node, name=graph.name, input=graph.input, output=graph.output, value_info=graph.value_info
        )
    )
    known = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < BIG:
            stub.graph.initializer.append(tensor)
        elif tensor.name not in known:
            kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            stub.graph.input.append(onnx.ValueInfoProto(name=tensor.name, type=kind))
    return stub


def _ops(model: onnx.ModelProto, path: Path) -> Iterator[Op]:
    """The operations in order, those of functions in the place of calls."""
    functions = {(f.domain, f.name): f for f in model.functions}
    count = 0

    def of(
        nodes: list[onnx.NodeProto],
        calls: tuple[str, ...],
        values: Mapping[str, str],
        outer: Mapping[str, onnx.AttributeProto],
    ) -> Iterator[Op]:
        if len(calls) > DEEPEST:
            raise WeftError(f"{path}: the function {calls[-1]!r} calls itself")
        stem = "/".join(calls)
        for i, node in enumerate(nodes):
            metadata = [x for p in node.metadata_props for x in (p.key, p.value)]
            texts = (node.op_type, node.domain, node.name, *node.input, *node.output, *metadata)
            if not all(isinstance(x, str) for x in texts):
                raise WeftError(f"{path}: operation {i} has a name that is not UTF-8")  # protobuf hands out bytes then
            attrs = _bound(node, outer)
            names = (*calls, node.name or f"{node.op_type}_{i}")
            inputs, outputs = (
                [values.get(x, f"{stem}/{x}" if stem and x else x) for x in ends] for ends in (node.input, node.output)
            )
            scopes = exported_scope({p.key: p.value for p in node.metadata_props})
            op = Op(node.op_type, node.domain, names, scopes, inputs, outputs, attrs, _captured(node))
            function = functions.get((node.domain, node.op_type))
            nonlocal count
            # Functions that call others twice double at every level: a small file could stand for billions of them.
            count += bool(calls)
            if count > MOST:
                raise WeftError(f"{path}: calls of functions stand for more than {MOST:,} operations, too many to draw")
            if function is None:
                yield op
                continue
            inner = dict(zip(function.input, [*op.inputs, *[""] * len(function.input)], strict=False))
            inner |= {a: b for a, b in zip(function.output, op.outputs, strict=False) if b}
            defaults = {a.name: a for a in function.attribute_proto}
            yield from of(list(function.node), names, inner, defaults | attrs)

    yield from of(list(model.graph.node), (), {}, {})


def _bound(node: onnx.NodeProto, outer: Mapping[str, onnx.AttributeProto]) -> dict[str, onnx.AttributeProto]:
    """The attributes of a node, those that a function hands on by the value that its call gave."""
    bound = {a.name: outer.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
    return {name: a for name, a in bound.items() if a is not None}


def _captured(node: onnx.NodeProto) -> tuple[str, ...]:
    """The values from around the node that graphs in its attributes read."""
    captured: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") or attribute.graphs else ():
            own = {v.name for v in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                captured |= dict.fromkeys(x for x in (*inner.input, *_captured(inner)) if x and x not in own)
                own |= {*inner.output}
            captured |= dict.fromkeys(v.name for v in graph.output if v.name not in own)
    return tuple(captured)


def _check(path: Path, ops: list[Op], known: set[str], outputs: Mapping[str, tuple[str, str]]) -> None:
    """Raise WeftError if something reads what nothing before it makes, or a value is made twice."""
    for op in ops:
        for name in (*op.inputs, *op.captured):
            if name and name not in known:
                raise WeftError(
                    f"{path}: {'/'.join(op.names)} ({op.kind}) reads {name!r}, which nothing before it makes"
                )
        if twice := known.intersection(filter(None, op.outputs)):
            raise WeftError(f"{path}: {'/'.join(op.names)} ({op.kind}) makes {min(twice)!r}, which is there already")
        known.update(op.outputs)
    if missing := next((name for name in outputs if name not in known), ""):
        raise WeftError(f"{path}: nothing makes the output {missing!r}")


# -- constants


def _without_sizes(
    ops: list[Op], constants: dict[str, Constant], types: Mapping[str, str], outputs: Collection[str]
) -> list[Op]:
    """`ops` but for those that make constants, or sizes out of shapes, which are added to `constants`."""
    left = []
    for op in ops:
        const = None
        if len(op.outputs) == 1 and op.outputs[0] not in outputs:
            const = constant(op.attrs) if op.kind == "Constant" else copied(op, constants)
            const = const or formula(op, constants, types)
        if const is None:
            left.append(op)
        else:
            constants[op.outputs[0]] = const
    return left


# -- vertices


def _vertices(
    ops: list[Op], constants: Mapping[str, Constant], types: Mapping[str, str], versions: Mapping[str, int]
) -> tuple[list[Vertex], dict[str, str]]:
    """The operations as vertices, and what their values are called there."""
    places = named(ops, constants)
    renamed: dict[str, str] = {}
    for op, (_, name) in zip(ops, places, strict=True):
        results = [x for x in op.outputs if x]
        for i, x in enumerate(results):
            renamed[x] = name if i == 0 else f"{name}.{_output(op, op.outputs.index(x), versions)}"
    unseen = {*constants}
    vertices = []
    for op, (scope, name) in zip(ops, places, strict=True):
        operands = list(zip(op.inputs, _roles(op, versions), strict=True))
        operands += [(x, "captured") for x in op.captured if x not in constants]
        values = [(x, role) for x, role in operands if x and x not in constants]
        parameters = [(constants[x], role, constants[x].source or x) for x, role in operands if x in constants]
        weights = [_weight(c, x, role, op, unseen) for c, role, x in parameters if not c.text]
        unseen -= {x for c, _, x in parameters if not c.text}
        vertex = Vertex(
            name,
            op.kind,
            scope,
            tuple(renamed.get(x, x) for x, _ in values),
            tuple(renamed[x] for x in op.outputs if x),
            tuple(role for _, role in values),
            tuple(types.get(x, "") for x in op.outputs if x),
            {k: described(a) for k, a in sorted(op.attrs.items())}
            | {role: c.text for c, role, _ in parameters if c.text},
            tuple(weights),
            view=op.kind in VIEWS,
        )
        operand_types = {role: types.get(x, "") for x, role in values}
        vertices.append(replace(vertex, like=alike(vertex, operand_types)))
    return gates(vertices), renamed


def _weight(weight: Constant, name: str, role: str, op: Op, unseen: set[str]) -> Weight:
    """A weight that `op` reads; its numbers count in the first operation that does."""
    size, shape, layout = weight.elements, weight.shape, None
    if role in PACKED.get(op.kind, ()):
        # The tensor holds several numbers a byte; only the attributes tell how many.
        name_of_bits = "expert_weight_bits" if op.kind == "QMoE" else "bits"
        bits, group = (op.attrs[key].i if key in op.attrs else 0 for key in (name_of_bits, "block_size"))
        if bits in INTEGER_BITS and group > 0:
            points = [x for x, other in zip(op.inputs, OPERANDS[op.kind], strict=False) if "zero_point" in other]
            layout = integer_layout(bits, group, any(points))
            size = size * 8 // bits if weight.dtype == "u8" else size
            shape = (*shape[:-1], shape[-1] * size // weight.elements) if weight.elements else shape
        if op.kind == "MatMulNBits" and {"N", "K"} <= op.attrs.keys():
            size = op.attrs["N"].i * op.attrs["K"].i
    counts = weight.numeric and not any(word in role for word in ("scale", "zero_point", "_cache"))
    learned = size if counts or role == "scale" else 0
    return Weight(
        name,
        f"[{', '.join(map(str, shape))}]",
        weight.dtype if layout is None else str(layout),
        weight.bytes,
        "",
        learned if name in unseen else 0,
        bits=None if layout is None else layout.bits_per_weight,
        packing="" if layout is None else in_words(layout),
    )


def _schema(op: Op, versions: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    domain = "" if op.domain == "ai.onnx" else op.domain
    version = versions.get(domain, versions.get("ai.onnx", 1))
    if not onnx.defs.has(op.kind, version, domain):
        return None
    return onnx.defs.get_schema(op.kind, version, domain)


def _roles(op: Op, versions: Mapping[str, int]) -> list[str]:
    """Name an operator's operands by the ONNX standard, or by the runtime that defines the operator."""
    if op.domain == MICROSOFT and op.kind in OPERANDS:
        names = list(OPERANDS[op.kind])
    else:
        schema = _schema(op, versions)
        names = [formal.name for formal in schema.inputs] if schema is not None else list(OPERANDS.get(op.kind, ()))
    return [names[min(i, len(names) - 1)] if names else f"input {i}" for i in range(len(op.inputs))]


def _output(op: Op, place: int, versions: Mapping[str, int]) -> str:
    """Name a result other than the first."""
    schema = _schema(op, versions)
    names = [formal.name for formal in schema.outputs] if schema is not None else []
    return names[place] if place < len(names) and names[place] != names[-1] else f"out{place}"
