"""The emitter of ONNX graphs: it collects values, nodes, constants and weights while lowerings run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np
import onnx_ir as onnx
from onnx import defs
from onnx.helper import find_min_ir_version_for, make_opsetid

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Growth
from weft.ir.recipes import Literal, Recipe
from weft.ir.recipes.readers import find_switched_tensors
from weft.ir.types import Shape, TensorType, dtypes, sizes
from weft.ir.types.dtypes import DType
from weft.ir.types.sizes import Poly, Size
from weft.passes.analysis.states import NamedState, find_state_inputs

from ..runtime.ort.session import ANY_SIZE
from ..target import Backend
from ..weights import StoredTensor

T = TypeVar("T")
P = ParamSpec("P")
Emitted = onnx.Value | Iterable[onnx.Value | None]  # the result of a lowering: the outputs of its node
Emit = Callable[["OnnxEmitter", Node], Emitted]
FLOAT = onnx.DataType.FLOAT
ONNX_DTYPES = {d.name: onnx.DataType.from_numpy(d.numpy) for d in dtypes.ALL.values() if not d.is_block}


# Names of sizes in models that optimum exports. transformers.js allocates empty caches by them.
OPTIMUM_SIZES = {
    "batch": sizes.sym("batch_size"),
    "seq": sizes.sym("sequence_length"),
    "past": sizes.sym("past_sequence_length"),
    "source": sizes.sym("encoder_sequence_length"),
}


@dataclass(frozen=True)
class StreamedInitializer(StoredTensor):
    """An initializer, `value`, whose bytes are streamed to disk."""

    value: onnx.Value


class OnnxEmitter:
    """The builder of one ONNX graph, to which lowerings append nodes; position tables have `max_length` rows. `states`
    are the caches and states of the model, whose ops may be expanded in `graph` (None: find them in `graph`). The model
    has no inputs `omitted` (of position_ids, attention_mask): it computes them for calls without padding."""

    def __init__(
        self,
        graph: Graph,
        target: Backend,
        max_length: int,
        states: Sequence[NamedState] | None = None,
        omitted: Collection[str] = (),
    ) -> None:
        self.graph, self.target, self.max_length = graph, target, max_length
        self.states = list(find_state_inputs(graph)) if states is None else states
        self.nodes: list[onnx.Node] = []
        self.weights: dict[tuple[Recipe, DType, str], StreamedInitializer] = {}
        self.constants: dict[tuple[str, tuple[int, ...], bytes], onnx.Value] = {}
        self.values: dict[Value, onnx.Value] = {}
        self.output_values: dict[Value, onnx.Value] = {}  # output of a value, if it is another one
        self._memo: dict[Any, Any] = {}
        self.repeated_outputs: dict[str, tuple[onnx.Value, Value]] = {}  # second writes of one cache
        self._names: set[str] = set(graph.outputs)  # reserved: `build_model` gives these names to the outputs
        self._scope = ""
        self.appends = any(spec.growth is Growth.APPEND for spec, _, _ in self.states)
        declared = {v: onnx.Value(name=name) for name, v in graph.inputs.items() if name not in omitted}
        self.inputs = [self._declare(value, get_storage_type(v.type)) for v, value in declared.items()]
        self.values.update(declared)
        self._names.update(graph.inputs)
        for name in omitted:
            self.values[graph.inputs[name]] = self._emit_without_padding(name)

    def _emit_without_padding(self, name: str) -> onnx.Value:
        """Return the input position_ids or attention_mask of a call without padding that continues the caches."""
        seq, past = self.size(sizes.sym("seq")), self.size(sizes.sym("past"))
        shape = self.shape(self.graph.inputs[name].type.shape)
        if name == "attention_mask":
            return self.op("Expand", self.constant(1), shape)
        return self.op("Expand", self.op("Add", self.range(seq), past), shape)

    # -- names and values

    def unique_name(self, hint: str) -> str:
        """Return a name that is not in use, and reserve it: `hint`, or if that is in use `hint`_2, `hint`_3, …"""
        name, n = hint, 1
        while name in self._names:
            n += 1
            name = f"{hint}_{n}"
        self._names.add(name)
        return name

    def _declare(self, value: onnx.Value, type: TensorType) -> onnx.Value:
        value.shape = onnx.Shape([s if isinstance(s, int) else self._name_size(s) for s in type.shape])
        value.type = onnx.TensorType(ONNX_DTYPES[type.dtype.name])
        return value

    def _name_size(self, size: Poly) -> str:
        as_optimum = self.appends or self.target.precision
        return str(sizes.substitute(size, OPTIMUM_SIZES)) if as_optimum else str(size).replace(" ", "")

    @overload
    def __getitem__(self, value: Value) -> onnx.Value: ...

    @overload
    def __getitem__(self, value: None) -> None: ...

    def __getitem__(self, value: Value | None) -> onnx.Value | None:
        """Return the ONNX value of an IR value (None for None); a parameter becomes an initializer on first use."""
        if value is None:
            return None
        if isinstance(value, Param):
            return self.weight(value.name, value.recipe, value.type.dtype)
        return self.values[value]

    def weight(self, name: str, recipe: Recipe, dtype: DType, role: str = "") -> onnx.Value:
        """Return the initializer of `recipe` in `dtype`, named after `name` if it is new. Calls with equal `recipe`,
        `dtype` and `role` return the same initializer. Initializers that differ only in `role` are separate values, but
        their bytes are stored once in the file."""
        # Tied weights have equal recipes: they become one initializer.
        key = (recipe, dtype, role)
        if key not in self.weights:
            shape = recipe.shape(self.graph.reader)
            value = self._declare(onnx.Value(name=self.unique_name(name)), TensorType(dtype, shape))
            self.weights[key] = StreamedInitializer(recipe, dtype, shape, value)
        return self.weights[key].value

    def constant(self, array: Any, dtype: type | np.dtype[Any] = np.int64, hint: str = "const") -> onnx.Value:
        """Return `array` in `dtype` as a constant, named after `hint` if new; equal arrays return the same value."""
        data = np.asarray(array, dtype)
        # The key has bytes, because -0.0 == 0.0 and NaN != NaN.
        key = (str(data.dtype), data.shape, data.tobytes())
        if key not in self.constants:
            name = self.unique_name(hint)
            tensor = onnx.tensor(data, name=name)
            shape, type = onnx.Shape(data.shape), onnx.TensorType(tensor.dtype)
            self.constants[key] = onnx.Value(name=name, shape=shape, type=type, const_value=tensor)
        return self.constants[key]

    def cast(self, value: onnx.Value | None, dtype: DType) -> onnx.Value:
        """Append a cast of `value` to `dtype`, and return the result."""
        return self.op("Cast", value, to=int(ONNX_DTYPES[dtype.name]))

    def scalar(self, number: float, like: DType) -> onnx.Value:
        """Return `number` as a constant of rank 0 in dtype `like`."""
        return self.constant(number, like.numpy)

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """Return the result that is cached under `key`; on first use call `make`. So nodes can share subgraphs."""
        if key not in self._memo:
            self._memo[key] = make()
        cached: T = self._memo[key]
        return cached

    # -- nodes

    def op(
        self, op_type: str, *inputs: onnx.Value | None, domain: str = "", hint: str = "", **attrs: Any
    ) -> onnx.Value:
        """Append a node with one output, and return the output. Attributes with the value None are left out; `hint`
        names the node (default: `op_type`)."""
        output: onnx.Value = self.many(op_type, *inputs, outputs=1, domain=domain, hint=hint, **attrs)[0]
        return output

    def many(
        self,
        op_type: str,
        *inputs: onnx.Value | None,
        outputs: int | Sequence[bool],
        domain: str = "",
        hint: str = "",
        **attrs: Any,
    ) -> list[Any]:
        """Append a node with several outputs, and return a list of them. Attributes with the value None are left out;
        `hint` names the node (default: `op_type`). `outputs` is the number of outputs, or a boolean per output: False
        leaves the output out of the node, and the list has None in its place."""
        if self.target.opset < 18 and op_type in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"):
            x, axes = inputs
            assert axes is not None and axes.const_value is not None
            inputs, attrs = (x,), {**attrs, "axes": axes.const_value.numpy().tolist()}
        present = [True] * outputs if isinstance(outputs, int) else list(outputs)
        name = self.unique_name(f"{self._scope}.{hint or op_type}" if self._scope else hint or op_type)
        values = [
            onnx.Value(name=self.unique_name(f"{name}.{i}" if i else name + ".out")) if w else None
            for i, w in enumerate(present)
        ]
        # In ONNX an omitted optional value has an empty name; at the end of the list it is dropped.
        named = [onnx.Value(name="") if v is None else v for v in _trim_missing(values)]
        present_attrs = {k: v for k, v in attrs.items() if v is not None}
        attributes = {a.name: a for a in onnx.convenience.convert_attributes(present_attrs)}
        self.nodes.append(onnx.Node(domain, op_type, _trim_missing(inputs), attributes, outputs=named, name=name))
        return values

    def pad(
        self, x: onnx.Value, amounts: tuple[Any, Any], axis: int, rank: int, dtype: DType, value: float = 0.0
    ) -> onnx.Value:
        """Append elements of `value` before and after `x`, of `rank` axes and `dtype`, on `axis`. The two `amounts` are
        integers or tensors [1]. All axes and the value are explicit: MNN needs both, and opset 17 the axes."""
        end = self.constant(value, dtype.numpy)
        if all(isinstance(n, int) for n in amounts):
            counts = [0] * 2 * rank
            counts[axis], counts[rank + axis] = amounts
            return self.op("Pad", x, self.constant(counts), end)
        before, after = (self.constant([n]) if isinstance(n, int) else n for n in amounts)
        zeros = self.constant([0] * axis), self.constant([0] * (rank - 1 - axis))
        pads = (zeros[0], before, zeros[1], zeros[0], after, zeros[1])
        return self.op("Pad", x, self.op("Concat", *pads, axis=0), end)

    def scan(
        self,
        step: Callable[..., Sequence[Any]],
        states: Sequence[Any],
        parts: Sequence[Any],
        dtypes_of: tuple[Sequence[DType], Sequence[DType]] | None = None,
    ) -> list[onnx.Value]:
        """Append a Scan along axis 1 of `parts` with the initial `states`; return the last states, then the outputs
        stacked along axis 1. `step` emits the body: a function (states…, items of `parts` at one index…) that returns
        the next states, then the outputs at this index. The body may read values of the outer graph. `dtypes_of` has
        the dtypes of its arguments and of its results (None: all f32)."""
        outer = self.nodes, self._memo
        self.nodes, self._memo = [], dict(self._memo)  # memoized values of the step exist in its subgraph only
        try:
            entries = [onnx.Value(name=self.unique_name("scan.in")) for _ in (*states, *parts)]
            results = list(step(*entries))
            argument_types, result_types = dtypes_of or ([dtypes.f32] * len(entries), [dtypes.f32] * len(results))
            for value, dtype in zip([*entries, *results], [*argument_types, *result_types], strict=True):
                value.type = onnx.TensorType(ONNX_DTYPES[dtype.name])
            n_states, constants = len(states), self._list_computed(outer[0])
            # OpenVINO reads no computed values of the outer graph: they are states that stay the same.
            for value in constants:
                entry = onnx.Value(name=self.unique_name("scan.in"), type=value.type or onnx.TensorType(FLOAT))
                for node in self.nodes:
                    for k in [k for k, v in enumerate(node.inputs) if v is value]:
                        node.replace_input_with(k, entry)
                entries.insert(n_states, entry)
                same = self.op("Identity", entry)
                same.type = entry.type
                results.insert(n_states, same)
            states = [*states, *reversed(constants)]
            body = onnx.Graph(entries, results, nodes=self.nodes, name=self.unique_name("scan"))
        finally:
            self.nodes, self._memo = outer
        axes: dict[str, Any] = {
            "scan_input_axes": [1] * len(parts),
            "scan_output_axes": [1] * (len(results) - len(states)),
        }
        last_values = self.many(
            "Scan", *states, *parts, outputs=len(results), body=body, num_scan_inputs=len(parts), **axes
        )
        return [*last_values[:n_states], *last_values[len(states) :]]

    def _list_computed(self, outer: Sequence[onnx.Node]) -> list[onnx.Value]:
        """Return the values that nodes of `outer` compute, or that are inputs of the graph, and the nodes read."""
        read = dict.fromkeys(v for node in self.nodes for v in node.inputs if v is not None)
        computed = {v for node in outer for v in node.outputs} | set(self.inputs)
        return [] if self.target.contrib else [v for v in read if v in computed]

    def range(self, size: onnx.Value) -> onnx.Value:
        """Return the integers from 0 to `size` − 1 as int64, for a `size` [1] computed in the graph."""
        return self.op("Range", self.constant(0), self.op("Squeeze", size, self.constant([0])), self.constant(1))

    def size(self, size: Size) -> onnx.Value:
        """Return the IR `size` as int64 [1]: a constant, or computed from the shapes of the inputs. Raises WeftError if
        it contains a named size that is the size of no input axis."""
        if isinstance(size, int):
            return self.constant([size])
        return self.memo(("size", size), lambda: self._emit_size(size))

    def _emit_size(self, size: Poly) -> onnx.Value:
        total: onnx.Value | None = None
        for mono, factor in size.terms:
            value: onnx.Value | None = None if factor == 1 and mono else self.constant([factor])
            for atom, power in mono:
                for _ in range(power):
                    atom_size = self._input_size(atom) if isinstance(atom, str) else self._size_call(atom)
                    value = atom_size if value is None else self.op("Mul", value, atom_size)
            total = value if total is None else self.op("Add", total, value)
        assert total is not None
        return total

    def _input_size(self, name: str) -> onnx.Value:
        for value in filter(self.values.__contains__, self.graph.inputs.values()):
            for axis, s in enumerate(value.type.shape):
                if s == sizes.sym(name):
                    return self.op("Shape", self[value], start=axis, end=axis + 1)
        raise WeftError(f"ONNX cannot compute size {name}: no axis of a graph input has this size")

    def _size_call(self, atom: sizes.SizeCall) -> onnx.Value:
        # Div of integers truncates, which is a floor here: sizes are not negative.
        op = {"min": "Min", "max": "Max", "floordiv": "Div"}[atom.fn]
        return self.op(op, *(self.size(a) for a in atom.args))

    def shape(self, shape: Shape, source: Shape | None = None) -> onnx.Value:
        """Return `shape` as an int64 tensor: a constant if no size is symbolic. With `source`, return the operand for a
        Reshape of a tensor of that shape: there 0 represents a symbolic size that equals the same axis of `source`, and
        −1 the only other symbolic size. If several others exist, all sizes are computed in the graph, and also next to
        a sum of sizes, by which tract cannot divide the number of elements."""
        if source is not None:
            spelled: list[int] = []
            for i, s in enumerate(shape):
                copied = source[i : i + 1] == (s,)
                # Of integers only one token per batch row, which may be several at run time (`_open_axis`).
                copied &= isinstance(s, Poly) or ((i, s) == (1, 1) and shape[:1] == source[:1])
                spelled.append(0 if copied else s if isinstance(s, int) else -1)
            sums = any(isinstance(s, Poly) and len(s.terms) > 1 for s in shape)
            if spelled.count(-1) <= 1 - sums:
                return self.constant(spelled)
        if all(isinstance(s, int) for s in shape):
            return self.constant(list(shape))
        return self.memo(("shape", shape), lambda: self.op("Concat", *(self.size(s) for s in shape), axis=0))

    # -- running lowerings

    def lower(self, chosen: Mapping[Node, Emit], scope: str | None = None) -> None:
        """Emit the graph's nodes in `chosen` by their lowerings, in order; name the results after the IR values. The
        names of ONNX nodes begin with `scope` (None: the scope of the IR node)."""
        for node in self.graph.nodes:
            if node in chosen:
                self._scope = node.scope if scope is None else scope
                self._name_results(node, chosen[node](self, node))

    def emit_subgraph(
        self, graph: Graph, inputs: Mapping[str, onnx.Value], chosen: Mapping[Node, Emit]
    ) -> list[onnx.Value]:
        """Emit the nodes of `graph`, such as the step of a scan, by the lowerings in `chosen`; `inputs` maps the names
        of its inputs to their ONNX values. Return the ONNX values of its outputs."""
        outer = self.graph, self._scope, self._memo
        self.graph, self._memo = graph, {}  # size names are local to it
        self.values.update((value, inputs[name]) for name, value in graph.inputs.items())
        try:
            self.lower(chosen, self._scope)
            return [self[value] for value in graph.outputs.values()]
        finally:
            self.graph, self._scope, self._memo = outer

    def _name_results(self, node: Node, emitted: Emitted) -> None:
        results = [emitted] if isinstance(emitted, onnx.Value) else list(emitted)
        for value, result in zip(node.outputs, results, strict=True):
            if result is None:
                continue
            self.values[value] = result
            # Rename only the output of the last node: a memoized value also belongs to other nodes.
            if result.type is None and (producer := result.producer()) is not None and producer is self.nodes[-1]:
                self._names.discard(str(result.name))
                result.name = self.unique_name(value.name)
            if result.type is None:
                self._declare(result, get_storage_type(value.type))

    def list_adapter_inputs(self) -> list[onnx.Value]:
        """Return the weights that are also graph inputs, so that an adapter can replace them at run time."""
        if (tensors := find_switched_tensors(self.graph.reader)) is None:
            return []
        return [w.value for w in self.weights.values() if tensors.reads_slots(w.recipe.sources())]

    def _open_axis(self, value: onnx.Value) -> None:
        """Replace the size 1 of axis 1 of all values that depend on the weight `value` by a symbol, so that a session
        may declare the weight as an input of any size (`session.declare_literal`); not of outputs, whose shape
        onnxruntime-genai relies on. Change nothing if a node would not accept another size."""
        dependent, size = {value}, f"{value.name}{ANY_SIZE}"
        for node in self.nodes:
            if not dependent.isdisjoint(node.inputs):
                dependent.update(node.outputs)
                if node.op_type in ("Reshape", "Expand", "Squeeze") and not _accepts_any_axis(node):
                    return
        for v in dependent - {value}:
            if v.name not in self.graph.outputs and v.shape is not None and v.shape[1:2] == (1,):
                v.shape = onnx.Shape([v.shape[0], size, *v.shape[2:]])

    def build_model(self) -> onnx.Model:
        """Return the ONNX model. Its weights are initializers without data; `export.write_models` or `serialize_model`
        adds the data. Raises WeftError if the target's opset lacks an operator."""
        outputs = []
        for name, value in self.graph.outputs.items():
            output = self.output_values.get(value, self[value])
            # An input, an initializer or a value that already is an output cannot take another name.
            if output.producer() is None or (output.name != name and output.name in self.graph.outputs):
                output = self.op("Identity", output)
            output.name = name
            self._declare(output, get_storage_type(value.type))
            outputs.append(output)
        for name, (output, value) in self.repeated_outputs.items():
            output.name = self.unique_name(name)
            outputs.append(self._declare(output, get_storage_type(value.type)))
        if self.target.contrib and self.target.device == "cpu" and not self.target.decodes:  # weft's runtime uses it
            for weight in self.weights.values():
                if isinstance(weight.recipe, Literal) and weight.recipe.replaceable:
                    self._open_axis(weight.value)
        # Collected last: an output that is a parameter becomes an initializer above.
        constants = [c for c in self.constants.values() if c.uses() or c in outputs]
        initializers = [*constants, *(w.value for w in self.weights.values())]
        graph = onnx.Graph(
            [*self.inputs, *self.list_adapter_inputs()],
            outputs,
            nodes=self.nodes,
            initializers=initializers,
            name=self.graph.name,
        )
        graph.opset_imports[""] = self._choose_opset(graph)
        if any(n.domain == "com.microsoft" for n in self.nodes):
            graph.opset_imports["com.microsoft"] = 1
        # Older runtimes refuse newer versions of the file format.
        version = find_min_ir_version_for([make_opsetid("", graph.opset_imports[""])])
        return onnx.Model(graph, ir_version=min(version, self.target.ir_version), producer_name="weft")

    def _choose_opset(self, graph: onnx.Graph) -> int:
        """Return the oldest opset, from 17, with the standard operators of `graph`: more runtimes open older models.
        Raises WeftError if it is newer than the target's."""
        kinds = {value.type.dtype.name for node in self.graph.nodes for value in node.outputs}
        needs = {17: "", 22 if "bf16" in kinds else 17: "bf16"}  # of many operators
        lacks = getattr(self.target, "lacks", ())
        for node in onnx.traversal.RecursiveGraphIterator(graph):
            if node.op_type in lacks:
                raise WeftError(f"{self.target.subject} has no {node.op_type}, which {node.name} needs")
            if node.domain == "" and defs.has(node.op_type):
                opset = _find_first_opset(node.op_type, len(node.inputs), frozenset(node.attributes))
                needs.setdefault(opset, node.op_type)
        if (oldest := max(needs)) > self.target.opset:
            raise WeftError(f"{needs[oldest]} needs opset {oldest}, but the model is for opset {self.target.opset}")
        return oldest


@functools.cache
def _find_first_opset(operator: str, operands: int, attributes: frozenset[str]) -> int:
    """Return the first opset, from 17, whose `operator` takes n = `operands` operands and all `attributes`."""
    for opset in range(17, defs.onnx_opset_version() + 1):
        if defs.has(operator, opset, ""):
            schema = defs.get_schema(operator, opset, "")
            if operands <= schema.max_input and attributes <= schema.attributes.keys():
                return opset
    raise WeftError(f"no opset of onnx has the operator {operator} with {operands} operands")


def _accepts_any_axis(node: onnx.Node) -> bool:
    """Return whether a Reshape copies axis 1, or flattens or copies the shape of a tensor."""
    shape = node.inputs[1] if node.op_type == "Reshape" else None
    if shape is None or shape.const_value is None:
        return shape is not None and (maker := shape.producer()) is not None and maker.op_type == "Shape"
    sizes_: list[int] = shape.const_value.numpy().tolist()
    return sizes_[1:2] == [0] or sizes_[0] == -1


def emit_once(emit: Callable[Concatenate[OnnxEmitter, P], T]) -> Callable[Concatenate[OnnxEmitter, P], T]:
    """Decorate a function (emitter, *hashable arguments): the first call emits nodes, and later calls with equal
    positional arguments return its result. Results that the body of a Scan computes are forgotten at its end."""

    @functools.wraps(emit)
    def look_up(e: OnnxEmitter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return e.memo((emit, *args), lambda: emit(e, *args, **kwargs))

    return look_up


def get_storage_type(type: TensorType) -> TensorType:
    """Return the ONNX type of an IR type: i4 tensors are stored as u8, two codes per byte along the last axis."""
    if type.dtype != dtypes.i4:
        return type
    return type.with_dtype(dtypes.u8).with_shape(*type.shape[:-1], sizes.floordiv(type.shape[-1], 2))


def _trim_missing(values: Sequence[onnx.Value | None]) -> list[onnx.Value | None]:
    kept_values = list(values)
    while kept_values and kept_values[-1] is None:
        kept_values.pop()
    return kept_values
