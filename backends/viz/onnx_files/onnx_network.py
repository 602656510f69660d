"""Conversion of any ONNX file to a network: operations with scopes from its exporter, weights and types.

External data is not read. Calls of functions are inlined. Constants, and values computed from shapes alone, become
attributes of their readers instead of operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from weft.ir.errors import WeftError
from weft.ir.types.block_layouts import INTEGER_BITS, build_integer_layout

from ..model.network import Network, Vertex, Weight, describe_layout
from .onnx_constants import (
    Constant,
    OnnxOperation,
    compute_constant,
    copy_weight,
    format_attribute,
    format_dtype,
    format_type,
    read_constant,
    read_initializer,
)
from .operators import MICROSOFT, OPERANDS, PACKED, VIEWS, find_equivalent, label_gates
from .scopes import make_unique, name_operations, read_exported_scope

BIG = 1 << 10  # bytes; larger tensors are weights, never parts of a shape
DEEPEST = 64  # nested function calls
MOST = 30_000  # operations in inlined functions; exporters call each function a few times
NEWEST = 1 << 16  # largest opset version accepted; the newest is 25 today

Attributes = dict[str, onnx.AttributeProto]


def read_onnx_network(path: Path) -> Network:
    """Read the ONNX model at `path` as a network to draw.

    Raises:
        WeftError: if the file cannot be read, is not a valid ONNX model, or expands to too many operations.
    """
    model = read_model(path)
    graph, ops = model.graph, list(_list_operations(model, path))
    constants = {tensor.name: read_initializer(tensor) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        constants[sparse.values.name] = Constant(format_dtype(sparse.values.data_type), tuple(sparse.dims), None)
    inputs = {v.name: format_type(v.type) for v in graph.input if v.name not in constants}
    types = {v.name: format_type(v.type) for v in _infer_types(model)}
    outputs = {v.name: (v.name, types.get(v.name, "")) for v in graph.output}
    ops = _fold_constants(ops, constants, types, outputs.keys())
    _check_values(path, ops, {*inputs, *constants}, outputs)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    vertices, renamed = _make_vertices(ops, constants, types, versions)
    return Network(
        graph.name if graph.name not in ("", "main_graph", "main", "torch_jit", "torch-jit-export") else path.stem,
        tuple(vertices),
        inputs,
        {name: (renamed.get(value, value), kind) for name, (value, kind) in outputs.items()},
    )


def join_networks(halves: Sequence[Network]) -> Network:
    """Return `halves`, in order, as one network: an output that is an input of a later one becomes an inner value."""
    network = halves[0]
    for part in halves[1:]:
        part = _rename_duplicates(part, {v.name for v in network.vertices})
        joints = {name: value for name, (value, _) in network.outputs.items() if name in part.inputs}
        vertices = (replace(v, reads=tuple(joints.get(x, x) for x in v.reads)) for v in part.vertices)
        inputs = {**network.inputs, **{name: kind for name, kind in part.inputs.items() if name not in joints}}
        outputs = {name: output for name, output in network.outputs.items() if name not in joints}
        network = Network(part.name, _merge_ops(network.vertices, [*vertices]), inputs, {**outputs, **part.outputs})
    return network


def _merge_ops(before: Sequence[Vertex], after: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return all operations, those of `before` in a scope of `after` just before their first reader there."""
    shared = {v.scope.partition(".")[0] for v in after if v.scope}
    first: dict[str, int] = {}
    # Backwards, so that the first reader of a value remains.
    for i, v in reversed([*enumerate(after)]):
        first |= dict.fromkeys(v.reads, i)
    late: dict[str, int] = {}
    for v in reversed(before):
        readers = [first[x] for x in v.makes if x in first]
        if readers and v.scope.partition(".")[0] in shared:
            late[v.name] = min(readers)
            for x in v.reads:
                first[x] = min(late[v.name], first.get(x, len(after)))
    order = [v for v in before if v.name not in late]
    for i, v in enumerate(after):
        order += [w for w in before if late.get(w.name) == i]
        order.append(v)
    return tuple(order)


def _rename_duplicates(network: Network, used: set[str]) -> Network:
    names: dict[str, str] = {}
    vertices = []
    for v in network.vertices:
        name = make_unique(v.name, used)
        names |= {x: name + x.removeprefix(v.name) for x in v.makes if name != v.name}
        reads, makes = (tuple(names.get(x, x) for x in values) for values in (v.reads, v.makes))
        vertices.append(replace(v, name=name, reads=reads, makes=makes))
    outputs = {name: (names.get(value, value), kind) for name, (value, kind) in network.outputs.items()}
    return replace(network, vertices=tuple(vertices), outputs=outputs)


# -- the file


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model in the file, without external data. Raises WeftError if the file is unreadable or invalid."""
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as e:
        raise WeftError(f"cannot read {path}: {(e.strerror or str(e)).lower()}") from e
    except DecodeError as e:
        raise WeftError(f"{path} is not a valid ONNX model, or is truncated: {e}") from e
    if wrong := next((o for o in model.opset_import if not 0 <= o.version <= NEWEST), None):
        opset = f"opset version {wrong.version} of {wrong.domain or 'ai.onnx'}"
        raise WeftError(f"{path}: {opset} is not between 0 and {NEWEST}: the file is damaged")
    if not model.ir_version or not (model.graph.node or model.graph.output):
        raise WeftError(f"{path} is not a valid ONNX model, or is truncated: it contains no graph")
    return model


def _infer_types(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield each value (name and type) whose type is recorded in the file or found by shape inference."""
    try:
        # infer_shapes takes the model as one protobuf message, of at most 2 GiB.
        light = onnx.shape_inference.infer_shapes(_strip_weights(model), data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError):
        light = model  # only the types in the file are known
    yield from (*light.graph.value_info, *light.graph.input, *light.graph.output)


def _strip_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with large weights replaced by inputs, because no shape depends on their elements."""
    graph, stub = model.graph, onnx.ModelProto(ir_version=model.ir_version)
    stub.opset_import.extend(model.opset_import)
    stub.functions.extend(model.functions)
    for name in ("node", "input", "output", "value_info"):
        getattr(stub.graph, name).extend(getattr(graph, name))
    inputs = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < BIG:
            stub.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            stub.graph.input.append(onnx.ValueInfoProto(name=tensor.name, type=kind))
    return stub


def _list_operations(model: onnx.ModelProto, path: Path) -> Iterator[OnnxOperation]:
    """Yield the operations in order, with calls of functions inlined."""
    functions = {(f.domain, f.name): f for f in model.functions}
    count = 0

    def of(
        nodes: list[onnx.NodeProto], calls: tuple[str, ...], values: Mapping[str, str], outer: Attributes
    ) -> Iterator[OnnxOperation]:
        if len(calls) > DEEPEST:
            raise WeftError(f"{path}: the function {calls[-1]!r} calls itself")
        stem = "/".join(calls)
        for i, node in enumerate(nodes):
            metadata = [x for p in node.metadata_props for x in (p.key, p.value)]
            strings = (node.op_type, node.domain, node.name, *node.input, *node.output, *metadata)
            if not all(isinstance(x, str) for x in strings):
                raise WeftError(f"{path} is damaged: node {i} has a name that is not UTF-8")  # protobuf returns bytes
            attrs = _resolve_attributes(node, outer)
            names = (*calls, node.name or f"{node.op_type}_{i}")
            inputs, outputs = (
                [values.get(x, f"{stem}/{x}" if stem and x else x) for x in ends] for ends in (node.input, node.output)
            )
            scopes = read_exported_scope({p.key: p.value for p in node.metadata_props})
            op = OnnxOperation(node.op_type, node.domain, names, scopes, inputs, outputs, attrs, find_captured(node))
            function = functions.get((node.domain, node.op_type))
            nonlocal count
            # Functions that call others twice double at every level: a small file could expand to billions of nodes.
            count += bool(calls)
            if count > MOST:
                raise WeftError(f"{path}: too many operations to draw: calls of functions expand to more than {MOST:,}")
            if function is None:
                yield op
                continue
            inner = dict(zip(function.input, [*op.inputs, *[""] * len(function.input)], strict=False))
            inner |= {a: b for a, b in zip(function.output, op.outputs, strict=False) if b}
            yield from of(list(function.node), names, inner, {a.name: a for a in function.attribute_proto} | attrs)

    yield from of(list(model.graph.node), (), {}, {})


def _resolve_attributes(node: onnx.NodeProto, outer: Attributes) -> Attributes:
    """Return the attributes of `node`, by name; references to attributes of its function are resolved in `outer`."""
    bound = {a.name: outer.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
    return {name: a for name, a in bound.items() if a is not None}


def find_captured(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the names of the outer values that subgraphs in the attributes of a node read."""
    captured: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") or attribute.graphs else ():
            inner_values = {v.name for v in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                operands = (*inner.input, *find_captured(inner))
                captured |= dict.fromkeys(x for x in operands if x and x not in inner_values)
                inner_values |= {*inner.output}
            captured |= dict.fromkeys(v.name for v in graph.output if v.name not in inner_values)
    return tuple(captured)


def _check_values(path: Path, ops: list[OnnxOperation], defined: set[str], outputs: Collection[str]) -> None:
    """Raise WeftError unless every value is in `defined`, or produced exactly once and before its readers."""
    for op in ops:
        where = f"{path}: {'/'.join(op.names)} ({op.kind})"
        for name in (*op.inputs, *op.captured):
            if name and name not in defined:
                raise WeftError(f"{where} reads {name!r}, which no earlier operation produces")
        if duplicates := defined.intersection(filter(None, op.outputs)):
            raise WeftError(f"{where} produces {min(duplicates)!r}, which an earlier operation produces too")
        defined.update(op.outputs)
    if missing := next((name for name in outputs if name not in defined), ""):
        raise WeftError(f"{path}: no operation produces the output {missing!r}")


# -- constants


def _fold_constants(
    ops: list[OnnxOperation], constants: dict[str, Constant], types: Mapping[str, str], outputs: Collection[str]
) -> list[OnnxOperation]:
    """Return `ops` without operations that compute constants or sizes from shapes; add the results to `constants`."""
    remaining = []
    for op in ops:
        const = None
        if len(op.outputs) == 1 and op.outputs[0] not in outputs:
            const = read_constant(op.attrs) if op.kind == "Constant" else copy_weight(op, constants)
            const = const or compute_constant(op, constants, types)
        if const is None:
            remaining.append(op)
        else:
            constants[op.outputs[0]] = const
    return remaining


# -- vertices


def _make_vertices(
    ops: list[OnnxOperation], constants: Mapping[str, Constant], types: Mapping[str, str], versions: Mapping[str, int]
) -> tuple[list[Vertex], dict[str, str]]:
    """Return the operations as vertices, and a map from value names in the file to new names."""
    scopes = name_operations(ops, constants)
    new_names: dict[str, str] = {}
    for op, (_, name) in zip(ops, scopes, strict=True):
        results = [x for x in op.outputs if x]
        for i, x in enumerate(results):
            new_names[x] = name if i == 0 else f"{name}.{_name_output(op, op.outputs.index(x), versions)}"
    uncounted = {*constants}
    vertices = []
    for op, (scope, name) in zip(ops, scopes, strict=True):
        operands = list(zip(op.inputs, _name_operands(op, versions), strict=True))
        operands += [(x, "captured") for x in op.captured if x not in constants]
        values = [(x, role) for x, role in operands if x and x not in constants]
        parameters = [(constants[x], role, constants[x].source or x) for x, role in operands if x in constants]
        weights = [_make_weight(c, x, role, op, uncounted) for c, role, x in parameters if not c.text]
        uncounted -= {x for c, _, x in parameters if not c.text}
        vertex = Vertex(
            name,
            op.kind,
            scope,
            tuple(new_names.get(x, x) for x, _ in values),
            tuple(new_names[x] for x in op.outputs if x),
            tuple(role for _, role in values),
            tuple(types.get(x, "") for x in op.outputs if x),
            {k: format_attribute(a) for k, a in sorted(op.attrs.items())}
            | {role: c.text for c, role, _ in parameters if c.text},
            tuple(weights),
            view=op.kind in VIEWS,
            file_names=tuple(op.outputs),
        )
        operand_types = {role: types.get(x, "") for x, role in values}
        vertices.append(replace(vertex, equivalent=find_equivalent(vertex, operand_types)))
    return label_gates(vertices), new_names


def _make_weight(weight: Constant, name: str, role: str, op: OnnxOperation, uncounted: set[str]) -> Weight:
    """Return the weight `name` that `op` reads as operand `role`; it counts as parameters if it is in `uncounted`."""
    size, shape, layout = weight.elements, weight.shape, None
    if role in PACKED.get(op.kind, ()):
        # The tensor packs several codes into a byte; only the attributes define how many.
        name_of_bits = "expert_weight_bits" if op.kind == "QMoE" else "bits"
        bits, group = (op.attrs[key].i if key in op.attrs else 0 for key in (name_of_bits, "block_size"))
        if bits in INTEGER_BITS and group > 0:
            points = [x for x, other in zip(op.inputs, OPERANDS[op.kind], strict=False) if "zero_point" in other]
            layout = build_integer_layout(bits, group, any(points))
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
        learned if name in uncounted else 0,
        bits=None if layout is None else layout.bits_per_weight,
        packing="" if layout is None else describe_layout(layout),
    )


def _find_schema(op: OnnxOperation, versions: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    domain = "" if op.domain == "ai.onnx" else op.domain
    version = versions.get(domain, versions.get("ai.onnx", 1))
    if not onnx.defs.has(op.kind, version, domain):
        return None
    return onnx.defs.get_schema(op.kind, version, domain)


def _name_operands(op: OnnxOperation, versions: Mapping[str, int]) -> list[str]:
    if op.domain == MICROSOFT and op.kind in OPERANDS:
        names = list(OPERANDS[op.kind])
    else:
        schema = _find_schema(op, versions)
        names = [formal.name for formal in schema.inputs] if schema is not None else list(OPERANDS.get(op.kind, ()))
    return [names[min(i, len(names) - 1)] if names else f"input {i}" for i in range(len(op.inputs))]


def _name_output(op: OnnxOperation, index: int, versions: Mapping[str, int]) -> str:
    """Return the name of output `index` (from 0) of `op` in the ONNX standard, or "out{index}" if none or variadic."""
    schema = _find_schema(op, versions)
    formals = schema.outputs if schema is not None else []
    is_named = index < len(formals) and formals[index].option != onnx.defs.OpSchema.FormalParameterOption.Variadic
    return formals[index].name if is_named else f"out{index}"
