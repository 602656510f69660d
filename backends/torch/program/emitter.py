"""The emitter: collects the statements of a program while lowerings run over a graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import OPS, Trait
from weft.ir.types import Shape
from weft.ir.types.sizes import Call, Poly, Size, sym
from weft.passes.analysis.states import keeper

from .constants import formula
from .statements import MOVES, TOP, TORCH_NAMES, CacheSlot, Operand, ParamRef, Program, Statement, Submodule, Var


class Emitter:
    """Collects the statements of one graph; lowerings receive it. ``emitter[value]`` is what a value became.

    `cached` are the nodes that keep something from call to call where the model is given a cache, `crosses` the
    attentions to an encoded text, which keep what they made of it. With `float8_caches` keys and values are kept in FP8
    where they can be.
    """

    calls_kernels: ClassVar[bool] = True  # the package `kernels` is next to the module

    def __init__(
        self,
        graph: Graph,
        cached: set[Node],
        keys: set[Node],
        crosses: set[Node] | None = None,
        float8_caches: bool = False,
    ) -> None:
        self.graph = graph
        self.cached = cached
        self.crosses = crosses or set()
        self.counts_keys = keys
        self.float8_caches = float8_caches
        self.program = Program(graph.name, cached=bool(cached), nodes=list(graph.nodes))
        self._made: dict[Value, Operand] = {}
        self._heads: dict[Value, tuple[int, Var]] = {}  # [batch, heads, seq, width] of [batch, seq, heads·width]
        self._leaves: dict[str, tuple[Submodule, tuple[Param, ...]]] = {}
        self._hoisted: dict[Hashable, tuple[Var, ...]] = {}
        self._keys: dict[Node, tuple[Var, Var | None]] = {}
        self.blocks: dict[Param, dict[str, Param]] = {}  # the tensors that stand for weights kept in blocks
        self._parts: Counter[str] | None = None  # how many parameters and inner scopes lie below a path
        self.scope = TOP
        self.node: Node | None = None
        self.start: Var | None = None  # how many tokens the cache held before the call
        for name, value in graph.inputs.items():
            self.program.inputs.append(var := Var(name, value.type.shape))
            self._made[value] = var

    def enter(self, node: Node) -> None:
        """Attribute following statements to `node`."""
        self.node, self.scope = node, node.scope

    def leave(self) -> None:
        """Attribute following statements to no node."""
        self.node, self.scope = None, TOP

    def __getitem__(self, value: Value) -> Operand:
        if value not in self._made:
            if isinstance(value, Param):
                self._made[value] = self.hold(value)
            else:
                made = self._heads[value][1]
                name = "x" if made.name == "x" else local_name(value)
                self._made[value] = self.emit("{0}.transpose(1, 2).flatten(2)", made, name=name)
        return self._made[value]

    def __setitem__(self, value: Value, made: Operand) -> None:
        self._made[value] = made

    def give(self, name: str, default: str, type: str) -> Var:
        """The input of the model called `name`; a new one, that may be left out, if the graph has none."""
        for var in self.program.inputs:
            if var.name == name:
                return var
        self.program.inputs.append(var := Var(name, type=type, default=default))
        return var

    # -- states

    def shown(self, value: Value | Operand) -> Value | Operand:
        """`value` [batch, seq, width] as recurrences read it: a model may hide padding."""
        return value

    def padding(self) -> Var | None:
        """The mask [batch, seq] of what is no padding, where a model may have some: states pass over it."""
        return None

    def keep_state(
        self, node: Node, slot: CacheSlot, parts: int, text: Callable[[str], str], operands: Sequence[Value | Operand]
    ) -> Var:
        """The result of the recurrence `node`, whose states, of `parts` tensors, are kept in `slot`: `text` calls it,
        on `operands`, with the states before."""
        place = f"{{{len(operands)}}}"
        return self.emit(f"keep({place}, {text(f'resumed({place})')})", *operands, slot)

    def all_keys(self, node: Node, make: Callable[[], tuple[Var, Var | None]]) -> tuple[Var, Var | None]:
        """All keys and values that the attention `node` reads, of its own cache as `make` gives them; or those that an
        earlier one made of the cache that it keeps for both."""
        first = keeper(node)
        if first not in self._keys:
            self._keys[first] = make()
        return self._keys[first]

    # -- heads

    def heads(self, value: Value, heads: Any, name: str = "") -> Var:
        """`value` [batch, seq, heads·width] as [batch, heads, seq, width], called `name` or as it is."""
        count, width = int(heads), self.size_of(value) // heads
        if (known := self.known_heads(value, count)) is not None:
            return known
        comment = f"[{', '.join(map(str, (*value.shape[:1], count, *value.shape[1:-1], width)))}]"
        split = value.producer
        apart = split.inputs[0] if split is not None and split.op is ops.reshape else None
        if apart is not None and len(apart.shape) == 4 and apart.shape[2] == count:
            text, x = "{0}.transpose(1, 2)", apart
        else:
            text, x = f"{{0}}.unflatten(-1, (-1, {width})).transpose(1, 2)", value
        return self.emit(text, x, name=name or local_name(value), replaces=None if name else 0, comment=comment)

    def known_heads(self, value: Value, count: int) -> Var | None:
        """`value` as `heads` gives it, if it was made so."""
        known, made = self._heads.get(value, (0, None))
        return made if known == count else None

    def set_heads(self, value: Value, count: int, made: Var) -> None:
        """`value` [batch, seq, count·width] stands, for whom it suits, as `made` [batch, count, seq, width]."""
        self._heads[value] = count, made

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
        """Append a statement in the current scope that makes one value, called `name` or as the node's output is."""
        return self.many(text, *operands, names=(name,), shapes=(shape,), replaces=replaces, comment=comment)[0]

    def many(
        self,
        text: str,
        *operands: Value | Operand,
        names: tuple[str, ...],
        shapes: tuple[Shape | None, ...] = (),
        replaces: int | None = None,
        comment: str = "",
    ) -> tuple[Var, ...]:
        """Append a statement that makes several values."""
        given = tuple(self[o] if isinstance(o, Value) else o for o in operands)
        own = local_name(self.node.output) if self.node is not None else "value"
        shapes = shapes or (None,) * len(names)
        made = tuple(Var(n or own, s) for n, s in zip(names, shapes, strict=True))
        self.program.statements.append(Statement(text, given, made, self.scope, replaces, comment, node=self.node))
        return made

    def hoist(self, key: Hashable, text: str, *operands: Value | Operand, name: str) -> Var:
        """The value of a statement in the model's own forward, made once for each `key`, that layers share."""
        return self.hoist_many(key, text, *operands, names=(name,))[0]

    def hoist_many(
        self, key: Hashable, text: str, *operands: Value | Operand, names: tuple[str, ...]
    ) -> tuple[Var, ...]:
        """The values of such a statement."""
        if key not in self._hoisted:
            outer, self.scope = self.scope, TOP
            try:
                self._hoisted[key] = self.many(text, *operands, names=names)
                self.program.statements[-1].early = True
            finally:
                self.scope = outer
        return self._hoisted[key]

    def once(self, key: Hashable, scope: str, text: str, *operands: Value | Operand, name: str) -> Var:
        """The value of a statement in an earlier `scope`, made once for each `key`."""
        if key not in self._hoisted:
            outer, self.scope, self.node = (self.scope, self.node), scope, None
            try:
                self._hoisted[key] = (self.emit(text, *operands, name=name),)
            finally:
                self.scope, self.node = outer
        return self._hoisted[key][0]

    def is_hoisted(self, var: Var) -> bool:
        """Return whether `var` is computed in the model's own forward, for layers to share."""
        return any(s.early and var in s.results for s in self.program.statements)

    def folded(self, var: Var, first: int) -> tuple[str, list[Operand]]:
        """The text that makes `var` of what comes from outside of the scope, its places numbered from `first`, and its
        operands."""
        s = next((s for s in self.program.statements if var in s.results), None)
        if s is None or s.scope != self.scope or any(isinstance(o, CacheSlot) for o in s.operands):
            return f"{{{first}}}", [var]
        texts, operands = [], list[Operand]()
        for o in s.operands:
            text, used = (
                self.folded(o, first + len(operands)) if isinstance(o, Var) else (f"{{{first + len(operands)}}}", [o])
            )
            texts.append(f"({text})" if not re.fullmatch(r"\{\d+\}", text) else text)
            operands += used
        made = s.text.format(*texts)
        return made if len(s.results) == 1 else f"({made})[{s.results.index(var)}]", operands

    def function(self, stem: str, text: str) -> str:
        """The name of a function of this model, ``{name}`` in its `text`: `stem`, or numbered where that is another."""
        n, name = 1, stem
        while self.program.functions.setdefault(name, text.replace("{name}", name)) != text.replace("{name}", name):
            n += 1
            name = f"{stem}{n}"
        return name

    # -- weights

    def leaf(self, init: str, **weights: Value | None) -> Submodule | None:
        """The module that holds `weights` under these names, made by `init`; None where the graph names or shares them
        so that no one module does: then the statement reads the weights themselves."""
        given = {name: w for name, w in weights.items() if w is not None}
        paths = {w.name.removesuffix(f".{name}") for name, w in given.items()}
        if len(paths) != 1 or not all(isinstance(w, Param) for w in given.values()):
            return None
        params = tuple(w for w in given.values() if isinstance(w, Param))
        (path,) = paths
        if not path or any(w.name != f"{path}.{name}" for name, w in given.items()):
            return None
        if not self._inside(path) or self._holds_more(path, params):
            return None
        leaf = Submodule(path, init, tuple(given))
        if path not in self._leaves:
            # An earlier statement reads the tensor without a module, so this one does, too: it must be held once.
            if any(p in self._made for p in params):
                return None
            self._leaves[path] = leaf, params
            for p in params:
                self._made[p] = ParamRef(p.name, self.shape_of(p))
                self.program.weights[p.name] = p
        return leaf if self._leaves[path] == (leaf, params) else None

    def _holds_more(self, path: str, params: tuple[Param, ...]) -> bool:
        """Return whether other names than `params` lie below `path`: then no single module of torch can stand there."""
        if self._parts is None:
            scopes = {node.scope for node in self.graph.nodes}
            self._parts = Counter(outer for name in (*scopes, *self.graph.params) for outer in _outer(name))
        return self._parts[path] > len(params)  # blocks of a weight are several

    def _inside(self, path: str) -> bool:
        """Return whether the module at `path` lies in the scope of the node."""
        return not self.scope or path.startswith(f"{self.scope}.")

    def hold(self, param: Param) -> Operand:
        """A parameter of the graph: a tensor that a module of the same path holds, or one that a formula makes."""
        if (text := formula(param.recipe)) is not None:
            return self.hoist(
                param.recipe, text, self._inputs()[0], name=param.name.rpartition(".")[2].removeprefix("alibi_")
            )
        self.program.weights[param.name] = param
        whole = "" if param.type.dtype.is_float else f"torch.{TORCH_NAMES[param.type.dtype.name]}"
        return ParamRef(param.name, self.shape_of(param), param.recipe.constant or bool(whole), whole)

    # -- sizes

    def size_of(self, value: Value, axis: int = -1) -> Any:
        """Return the size of an axis of `value` as generated code has it: an int, or what prints as its name."""
        return value.shape[axis]

    def shape_of(self, value: Value) -> tuple[Any, ...]:
        """Return the sizes of all axes of `value` as generated code has them."""
        return tuple(self.size_of(value, axis) for axis in range(len(value.shape)))

    def attr(self, node: Node, name: str) -> Any:
        """Return an attribute of `node` as generated code has it: a number, or what prints as its name."""
        return node.attrs[name]

    def size(self, size: Size, *near: Value) -> tuple[str, list[Operand]]:
        """`size` as text, its places numbered from 0, and its operands: an axis of one of the values `near`, if any."""
        if not isinstance(size, Poly):
            return str(size), []
        for v in near:
            if size in v.shape and isinstance(v.shape, tuple) and not isinstance(self[v], ParamRef):
                return f"{{0}}.shape[{v.shape.index(size)}]", [self[v]]
        operands: list[Operand] = []
        terms = [self._term(mono, factor, operands) for mono, factor in size.terms]
        return "(" + " + ".join(terms) + ")" if len(terms) > 1 else terms[0], operands

    def _term(self, mono: tuple[tuple[str | Call, int], ...], factor: int, operands: list[Operand]) -> str:
        parts = [str(factor)] if factor != 1 or not mono else []
        for atom, power in mono:
            if isinstance(atom, Call):
                args = []
                for arg in atom.args:
                    text, used = self.size(arg)
                    args.append(_renumbered(text, len(operands)))
                    operands.extend(used)
                one = f"({' // '.join(args)})" if atom.fn == "floordiv" else f"{atom.fn}({', '.join(args)})"
            else:
                one = f"{{{len(operands)}}}"
                operands.append(self._named_size(atom))
            parts += [one] * power
        return " * ".join(parts)

    def _inputs(self) -> list[Value]:
        """The inputs of the graph, those first that no call leaves out."""
        return sorted(
            self.graph.inputs.values(), key=lambda v: isinstance(m := self._made.get(v), Var) and bool(m.default)
        )

    def _named_size(self, name: str) -> Var:
        for value in self._inputs():
            if sym(name) in value.shape:
                axis = value.shape.index(sym(name))
                return self.hoist(("size", name), f"{{0}}.shape[{axis}]", value, name=name)
        raise WeftError(f"size {name} is not the size of any axis of the graph inputs")

    def shape(self, shape: Shape, *near: Value, first: int = 0) -> tuple[str, list[Operand]]:
        """`shape` as comma-separated text whose places are numbered from `first`, and its operands."""
        texts, operands = [], list[Operand]()
        for s in shape:
            text, used = self.size(s, *near)
            texts.append(_renumbered(text, first + len(operands)))
            operands += used
        return ", ".join(texts), operands


def _outer(name: str) -> list[str]:
    """The paths that `name` lies below."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def local_name(value: Value) -> str:
    """The last part of the name of a value; if that is only what made it, what it is for who reads it."""
    own, made = re.sub(r"(?<=.)_\d+$", "", value.name.rpartition(".")[2]), value.producer
    own = f"v_{own}" if own.isdigit() else own  # of a list of modules
    fused = made is not None and Trait.FUSED in made.op.traits and own in OPS  # which keeps the name of what it was
    if made is None or not value.uses or (own != made.op.name.removesuffix("_") and not fused):
        return own
    reader, index = value.uses[0]
    if reader.op in MOVES:
        return local_name(reader.output)
    operands = reader.op.operands
    wanted = operands[min(index, len(operands) - 1)].name
    if len(operands) > 1 and wanted not in ("x", "xs", "y"):
        return wanted
    return "y" if value.type.dtype.is_float else own


def _renumbered(text: str, by: int) -> str:
    """`text` with its places moved up by `by`."""
    return re.sub(r"\{(\d+)\}", lambda m: f"{{{int(m[1]) + by}}}", text)
