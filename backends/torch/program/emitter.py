"""The emitter collects the statements of a program while lowerings run over a graph."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import OPS, Trait
from weft.ir.types import Shape
from weft.ir.types.sizes import Poly, Size, SizeCall, sym
from weft.passes.analysis.states import find_cache_owner

from .statements import (
    MOVES,
    TOP,
    TORCH_NAMES,
    CacheSlot,
    Operand,
    ParamRef,
    Program,
    Statement,
    Submodule,
    Var,
    write_formula,
)


class Emitter:
    """Collects the statements of `graph`; every lowering receives it. ``emitter[value]`` is the operand of a graph
    value. cached: nodes with a KV cache or state. bias_nodes: nodes that compute attention biases; an iota among them
    counts cached keys, not new tokens. cross_attentions: attentions that cache the encoder's keys and values.
    float8_caches: store KV caches in FP8."""

    calls_kernels: ClassVar[bool] = True  # the package `kernels` is shipped with the module
    has_comments: ClassVar[bool] = True  # statements get comments, which explain sizes

    def __init__(
        self,
        graph: Graph,
        cached: set[Node],
        bias_nodes: set[Node],
        cross_attentions: set[Node] | None = None,
        float8_caches: bool = False,
    ) -> None:
        self.graph = graph
        self.cached = cached
        self.cross_attentions = cross_attentions or set()
        self.bias_nodes = bias_nodes
        self.float8_caches = float8_caches
        self.program = Program(graph.name, cached=bool(cached), nodes=list(graph.nodes))
        self._operands: dict[Value, Operand] = {}
        self._heads: dict[Value, tuple[int, Var]] = {}  # [batch, heads, seq, width] of [batch, seq, heads·width]
        self._submodules: dict[str, tuple[Submodule, tuple[Param, ...]]] = {}
        self._hoisted: dict[Hashable, tuple[Var, ...]] = {}
        self._shared_keys: dict[Node, tuple[Var, Var | None]] = {}
        self.blocks: dict[Param, dict[str, Param]] = {}  # the stored tensors of weights in blocks
        self._name_counts: Counter[str] | None = None  # the number of parameters and inner scopes below a path
        self.scope = TOP
        self.node: Node | None = None
        self.start: Var | None = None  # the length of the cache before the call
        self.advance: Statement | None = None  # it advances the cache if no statement needs `start`
        for name, value in graph.inputs.items():
            self.program.inputs.append(var := Var(name, value.type.shape))
            self._operands[value] = var

    def enter(self, node: Node) -> None:
        """Make `node` the origin of the statements emitted from now on, and its scope the current scope."""
        self.node, self.scope = node, node.scope

    def leave(self) -> None:
        """Emit the following statements for no node, and in the scope of the whole model."""
        self.node, self.scope = None, TOP

    def __getitem__(self, value: Value) -> Operand:
        if value not in self._operands:
            if isinstance(value, Param):
                self._operands[value] = self.resolve_param(value)
            else:
                by_head = self._heads[value][1]
                name = "x" if by_head.name == "x" else choose_name(value)
                self._operands[value] = self.emit("{0}.transpose(1, 2).flatten(2)", by_head, name=name)
        return self._operands[value]

    def __setitem__(self, value: Value, operand: Operand) -> None:
        self._operands[value] = operand

    def declare_input(self, name: str, default: str, type: str) -> Var:
        """Return the model input called `name`. If there is none, add one; `default` is the source of its default
        value, "" for none, and `type` its annotation."""
        var = next((v for v in self.program.inputs if v.name == name), None)
        if var is None:
            self.program.inputs.append(var := Var(name, type=type, default=default))
        return var

    # -- states

    def zero_padding(self, value: Value | Operand) -> Value | Operand:
        """Return `value` [batch, seq, width] with zeros at padding tokens: here unchanged, as no input is padded."""
        return value

    def padding_mask(self) -> Var | None:
        """Return the mask [batch, seq] of tokens that are not padding: here None, as no input is padded."""
        return None

    def emit_with_state(
        self, node: Node, slot: CacheSlot, parts: int, text: Callable[[str], str], operands: Sequence[Value | Operand]
    ) -> Var:
        """Emit the recurrence `node`, whose state of `parts` tensors is in `slot`, and return its result. `text` maps
        the source of the previous state to that of a pair (result, new state), with placeholders for `operands`."""
        place = f"{{{len(operands)}}}"
        return self.emit(f"store_state({place}, {text(f'previous_state({place})')})", *operands, slot)

    def emit_keys_once(self, node: Node, make: Callable[[], tuple[Var, Var | None]]) -> tuple[Var, Var | None]:
        """Return (keys, values or None) of `node`: the result of `make`, called once for nodes that share a cache."""
        first = find_cache_owner(node)
        if first not in self._shared_keys:
            self._shared_keys[first] = make()
        return self._shared_keys[first]

    # -- heads

    def split_heads(self, value: Value, heads: Any, name: str = "") -> Var:
        """Return `value` [batch, seq, heads·width] as a variable `name` [batch, heads, seq, width]; emit it unless it
        exists. The name defaults to that of `value`."""
        count, width = int(heads), self.size_of(value) // heads
        if (by_head := self.find_heads(value, count)) is not None:
            return by_head
        comment = f"[{', '.join(map(str, (*value.shape[:1], count, *value.shape[1:-1], width)))}]"
        split = value.producer
        source = split.inputs[0] if split is not None and split.op is ops.reshape else None
        if source is not None and len(source.shape) == 4 and source.shape[2] == count:
            text, x = "{0}.transpose(1, 2)", source
        else:
            text, x = f"{{0}}.unflatten(-1, (-1, {width})).transpose(1, 2)", value
        return self.emit(text, x, name=name or choose_name(value), replaces=None if name else 0, comment=comment)

    def find_heads(self, value: Value, count: int) -> Var | None:
        """Return `value` as [batch, count, seq, width] if it was computed in that layout, else None."""
        heads, by_head = self._heads.get(value, (0, None))
        return by_head if heads == count else None

    def record_heads(self, value: Value, count: int, by_head: Var) -> None:
        """Record that `value` [batch, seq, count·width] is computed as `by_head` [batch, count, seq, width]."""
        self._heads[value] = count, by_head

    # -- statements

    def emit(
        self,
        text: str,
        *operands: Value | Operand,
        name: str = "",
        shape: Shape | None = None,
        replaces: int | None = None,
        comment: str = "",
    ) -> Var:
        """Append a statement in the current scope and return its result; `name` defaults to the node's output. `text`
        is an expression with placeholders ``{0}``, ``{1}`` … for `operands`; the other arguments are fields of
        `Statement` and `Var`."""
        return self.emit_tuple(text, *operands, names=(name,), shapes=(shape,), replaces=replaces, comment=comment)[0]

    def emit_tuple(
        self,
        text: str,
        *operands: Value | Operand,
        names: tuple[str, ...],
        shapes: tuple[Shape | None, ...] = (),
        replaces: int | None = None,
        comment: str = "",
    ) -> tuple[Var, ...]:
        """Append a statement whose result is a tuple, and return a variable for each of its values, called `names`."""
        resolved = tuple(self[o] if isinstance(o, Value) else o for o in operands)
        default = choose_name(self.node.output) if self.node is not None else "value"
        shapes = shapes or (None,) * len(names)
        results = tuple(Var(n or default, s) for n, s in zip(names, shapes, strict=True))
        comment = comment if self.has_comments else ""
        statement = Statement(text, resolved, results, self.scope, replaces, comment, node=self.node)
        self.program.statements.append(statement)
        return results

    def hoist(self, key: Hashable, text: str, *operands: Value | Operand, name: str) -> Var:
        """Emit a statement in the model's forward, before the layers, once for each `key`; return its result."""
        return self.hoist_tuple(key, text, *operands, names=(name,))[0]

    def hoist_tuple(
        self, key: Hashable, text: str, *operands: Value | Operand, names: tuple[str, ...]
    ) -> tuple[Var, ...]:
        """Emit a statement with several results before the layers, once for each `key`; return its results."""
        if key not in self._hoisted:
            outer, self.scope = self.scope, TOP
            try:
                self._hoisted[key] = self.emit_tuple(text, *operands, names=names)
                self.program.statements[-1].early = True
            finally:
                self.scope = outer
        return self._hoisted[key]

    def emit_once(self, key: Hashable, scope: str, text: str, *operands: Value | Operand, name: str) -> Var:
        """Emit a statement in `scope` instead of the current one, once for each `key`; return its result."""
        if key not in self._hoisted:
            outer, self.scope, self.node = (self.scope, self.node), scope, None
            try:
                self._hoisted[key] = (self.emit(text, *operands, name=name),)
            finally:
                self.scope, self.node = outer
        return self._hoisted[key][0]

    def is_hoisted(self, var: Var) -> bool:
        """Return whether `var` is a result of `hoist` or `hoist_tuple`."""
        return any(s.early and var in s.results for s in self.program.statements)

    def inline(self, var: Var, first: int) -> tuple[str, list[Operand]]:
        """Return an expression for `var`, and the operands of its placeholders, which count from `first`. Statements of
        the current scope are inlined into the expression, except those with a cache."""
        s = next((s for s in self.program.statements if var in s.results), None)
        if s is None or s.scope != self.scope or any(isinstance(o, CacheSlot) for o in s.operands):
            return f"{{{first}}}", [var]
        texts, operands = [], list[Operand]()
        for o in s.operands:
            at = first + len(operands)
            text, used = self.inline(o, at) if isinstance(o, Var) else (f"{{{at}}}", [o])
            texts.append(f"({text})" if not re.fullmatch(r"\{\d+\}", text) else text)
            operands += used
        folded = s.text.format(*texts)
        return folded if len(s.results) == 1 else f"({folded})[{s.results.index(var)}]", operands

    def add_function(self, stem: str, text: str) -> str:
        """Add a function to the generated source and return its name: `stem`, followed by a number if the name is
        taken. `text` is its source, with ``{name}`` for the name; equal functions are added once."""
        n, name = 1, stem
        while self.program.functions.setdefault(name, text.replace("{name}", name)) != text.replace("{name}", name):
            n += 1
            name = f"{stem}{n}"
        return name

    # -- weights

    def make_submodule(self, init: str, **weights: Value | None) -> Submodule | None:
        """Return a module constructed by `init`, whose attributes are the parameters `weights` (None is skipped).
        Return None if these are not exactly the members of one module in this scope, or if an earlier statement reads
        one of them directly or in a module with another `init`. The caller must then read the weights."""
        present = {name: w for name, w in weights.items() if w is not None}
        params = tuple(w for w in present.values() if isinstance(w, Param))
        path = next(w.name.removesuffix(f".{name}") for name, w in present.items())
        if len(params) < len(present) or any(w.name != f"{path}.{name}" for name, w in present.items()):
            return None
        outside = self.scope and not path.startswith(f"{self.scope}.")
        if outside or self._has_other_members(path, params):
            return None
        leaf = Submodule(path, init, tuple(present))
        if path not in self._submodules:
            # An earlier statement reads the tensor without a module, so this one must also: one owner per tensor.
            if any(p in self._operands for p in params):
                return None
            self._submodules[path] = leaf, params
            for p in params:
                self._operands[p] = ParamRef(p.name, self.shape_of(p))
                self.program.weights[p.name] = p
        return leaf if self._submodules[path] == (leaf, params) else None

    def _has_other_members(self, path: str, params: tuple[Param, ...]) -> bool:
        if self._name_counts is None:
            names = (*{node.scope for node in self.graph.nodes}, *self.graph.params)
            prefixes = (itertools.accumulate(name.split("."), "{}.{}".format) for name in names)
            self._name_counts = Counter(itertools.chain.from_iterable(prefixes))
        return self._name_counts[path] > len(params)  # a weight in blocks has several tensors

    def resolve_param(self, param: Param) -> Operand:
        """Return the operand of `param`: a hoisted variable if it has a formula (`write_formula`); else a `ParamRef`,
        whose tensor becomes a weight of the program."""
        if (text := write_formula(param.recipe)) is not None:
            name = param.name.rpartition(".")[2].removeprefix("alibi_")
            return self.hoist(param.recipe, text, self._sort_inputs()[0], name=name)
        self.program.weights[param.name] = param
        dtype = "" if param.type.dtype.is_float else f"torch.{TORCH_NAMES[param.type.dtype.name]}"
        return ParamRef(param.name, self.shape_of(param), param.recipe.is_constant or bool(dtype), dtype)

    # -- sizes

    def size_of(self, value: Value, axis: int = -1) -> Any:
        """Return the size of an axis of `value`: an int, or an object that prints as a name in the generated code."""
        return value.shape[axis]

    def shape_of(self, value: Value) -> tuple[Any, ...]:
        """Return the sizes of all axes of `value`, as `size_of` does."""
        return tuple(self.size_of(value, axis) for axis in range(len(value.shape)))

    def attr(self, node: Node, name: str) -> Any:
        """Return the attribute `name` of `node`, or an object that prints as a name in the generated code."""
        return node.attrs[name]

    def write_size(self, size: Size, *near: Value) -> tuple[str, list[Operand]]:
        """Return an expression for `size` with placeholders from ``{0}`` on, and its operands. A symbolic size is read
        from the first value of `near` that has it, else computed from the graph inputs; raise WeftError if no input has
        it."""
        if not isinstance(size, Poly):
            return str(size), []
        for v in near:
            if size in v.shape and isinstance(v.shape, tuple) and not isinstance(self[v], ParamRef):
                return f"{{0}}.shape[{v.shape.index(size)}]", [self[v]]
        operands: list[Operand] = []
        terms = [self._write_term(mono, factor, operands) for mono, factor in size.terms]
        return "(" + " + ".join(terms) + ")" if len(terms) > 1 else terms[0], operands

    def _write_term(self, mono: tuple[tuple[str | SizeCall, int], ...], factor: int, operands: list[Operand]) -> str:
        parts = [str(factor)] if factor != 1 or not mono else []
        for atom, power in mono:
            if isinstance(atom, SizeCall):
                args, used = self._write_sizes(atom.args, first=len(operands))
                operands += used
                base = f"({' // '.join(args)})" if atom.fn == "floordiv" else f"{atom.fn}({', '.join(args)})"
            else:
                base = f"{{{len(operands)}}}"
                operands.append(self._emit_size(atom))
            parts += [base] * power
        return " * ".join(parts)

    def _sort_inputs(self) -> list[Value]:
        """Return the inputs of the graph, required ones first."""
        optional = {v for v, o in self._operands.items() if isinstance(o, Var) and o.default}
        return sorted(self.graph.inputs.values(), key=lambda v: v in optional)

    def _emit_size(self, name: str) -> Var:
        for value in self._sort_inputs():
            if sym(name) in value.shape:
                axis = value.shape.index(sym(name))
                return self.hoist(("size", name), f"{{0}}.shape[{axis}]", value, name=name)
        raise WeftError(f"the size {name} cannot be computed: no axis of a graph input has this size")

    def write_shape(self, shape: Shape, *near: Value, first: int = 0) -> tuple[str, list[Operand]]:
        """Return comma-separated expressions for the sizes in `shape`, and their operands. Placeholders count from
        `first`; `near` is as in `write_size`."""
        texts, operands = self._write_sizes(shape, *near, first=first)
        return ", ".join(texts), operands

    def _write_sizes(self, sizes: Sequence[Size], *near: Value, first: int) -> tuple[list[str], list[Operand]]:
        texts, operands = list[str](), list[Operand]()
        for size in sizes:
            text, used = self.write_size(size, *near)
            start = first + len(operands)
            texts.append(text.format(*(f"{{{start + i}}}" for i in range(len(used)))))
            operands += used
        return texts, operands


def choose_name(value: Value) -> str:
    """Return a variable name for `value`: the last part of its name, unless that is only the name of its op. Then it is
    the operand name by which its first reader, reshapes and transposes skipped, reads it. If that is x, xs or y, or the
    reader's only operand, a float value is called y, and any other keeps the last part of its name."""
    name, maker = re.sub(r"(?<=.)_\d+$", "", value.name.rpartition(".")[2]), value.producer
    name = f"v_{name}" if name.isdigit() else name  # an index of a list of modules
    fused = maker is not None and Trait.FUSED in maker.op.traits and name in OPS  # named after an op that it replaced
    if maker is None or not value.uses or (name != maker.op.name.removesuffix("_") and not fused):
        return name
    reader, index = value.uses[0]
    if reader.op in MOVES:
        return choose_name(reader.output)
    operands = reader.op.operands
    wanted = operands[min(index, len(operands) - 1)].name
    if len(operands) > 1 and wanted not in ("x", "xs", "y"):
        return wanted
    return "y" if value.type.dtype.is_float else name
