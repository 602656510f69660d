"""The emitter of decode steps: its statements read the weights of the model's modules, some of them packed."""

from __future__ import annotations

import itertools
import keyword
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Op
from weft.ir.registry import Registry
from weft.ir.types.block_layouts import BlockLayout
from weft.passes.analysis.states import find_cache_owner, find_caches

from ..codegen.method_writer import write_attribute
from ..program.block_params import find_layout
from ..program.emitter import Emitter, choose_name
from ..program.stateful_nodes import emit_query_positions, find_cached_nodes, find_key_bias_nodes
from ..program.statements import TOP, Operand, ParamRef, Statement, Submodule, Var

TICKETS = Submodule("tickets", "Tickets")
Refusal = Callable[[torch.dtype], "str | None"]  # why no kernel takes weights of this dtype, or None


@dataclass
class Implementation:
    """The implementation of `node` in a decode step: a call of the kernel called `kernel`; or if that is "", the
    model's lowering to torch, for a `reason`. refusals: functions from a dtype to the reason why the kernel falls back
    to torch in this dtype, or to None."""

    node: Node
    kernel: str = ""
    reason: str = ""
    refusals: tuple[Refusal, ...] = ()


class StepEmitter(Emitter):
    """Collects the statements of a decode step; `choices` records the implementation of each node of the fused `graph`.
    In the `init` of a `Submodule`, ``{0}`` is the model's module at the path of the `Submodule` without its last part.
    functions: name → source of the model's generated functions. reads_prompts: a step takes several tokens per batch
    row. float8_caches: KV caches are in FP8."""

    def __init__(
        self, graph: Graph, functions: Mapping[str, str], reads_prompts: bool = False, float8_caches: bool = False
    ) -> None:
        cached = find_cached_nodes(graph)
        super().__init__(graph, cached, find_key_bias_nodes(graph, cached), float8_caches=float8_caches)
        self.program.functions, self.reads_prompts = dict(functions), reads_prompts
        keepers = (find_cache_owner(n) if find_caches(n) else n for n in graph.nodes if n in cached)
        self._cache_owners = [*dict.fromkeys(keepers)]
        self.choices: list[Implementation] = []
        self.kernels: dict[str, str] = {}  # generated for this model: source by name
        self.shared_caches: dict[Node, Var] = {}  # caches that several attentions read
        self.most_tickets = 0
        self._norms: dict[tuple[str, str], list[float]] = {}  # ε of norms without weights, by scope and kind
        positions = self.declare_input("position_ids", "", "Tensor")
        self._hoisted["position_ids"] = self._hoisted["written"] = (positions,)
        text, operands = "{0}.advance(1)", [self.declare_input("cache", "", "Cache")]
        if reads_prompts:
            text, operands = "{0}.advance({1}.shape[1])", [*operands, self.declare_input("input_ids", "", "Tensor")]
        self.start = self.emit(text, *operands, name="start")
        self.start.type = "int"
        self.advance = Statement(text, tuple(operands), (), TOP)

    def declare_input(self, name: str, default: str, type: str) -> Var:
        if name == "last":
            return super().declare_input(name, default, type)
        return super().declare_input(name, "", type.removesuffix(" | None"))

    def make_submodule(self, init: str, **weights: Value | None) -> Submodule | None:
        leaf = super().make_submodule(init, **weights)
        return None if leaf is None else Submodule(f"{leaf.path}.module", "{0}", leaf.tensors)

    @property
    def positions(self) -> Operand:
        """Return the positions of the new tokens, [batch, seq]."""
        return emit_query_positions(self)

    def emit_tickets(self, each: int) -> Var:
        """Emit and return counters for blocks of a kernel to synchronize with, at least `each` per batch row."""
        self.most_tickets = max(self.most_tickets, each)
        tokens = self.declare_input("input_ids", "", "Tensor")
        return self.hoist("tickets", "{0}({1})", TICKETS, tokens, name="tickets")

    def record_kernel(self, kernel: str, *refusals: Refusal, node: Node | None = None) -> None:
        """Record that `kernel` computes `node`, by default the current one; `refusals` are as in `Implementation`."""
        node = node or self.node
        assert node is not None
        self.choices.append(Implementation(node, kernel, refusals=refusals))

    def record_fallback(self, reason: str) -> None:
        """Record the `reason` why no kernel computes the current node."""
        assert self.node is not None
        self.choices.append(Implementation(self.node, reason=reason))

    def make_placeholders(self, node: Node) -> tuple[Var, ...]:
        """Return new variables for the outputs of `node` without a statement: the lowering of its reader emits it."""
        return tuple(Var(choose_name(value)) for value in node.outputs)

    # -- weights of kernels

    def get_weight(self, value: Value | None) -> Operand | None:
        """Return the weight `value` as an operand: a parameter, quantized blocks as `Codes`, or the result of an
        `ops.pack` as one tensor. Return None if `value` is None, or `pack_params` cannot pack these parameters."""
        if value is None:
            return None
        if not isinstance(value, Param):
            pack = value.producer
            assert pack is not None and pack.op is ops.pack
            return self.pack_params([w for w in pack.inputs if isinstance(w, Param)])
        if isinstance(find_layout(value), BlockLayout):
            stem = value.name.removesuffix(".weight")
            return Submodule(f"{stem}_blocks", f"{write_attribute('{0}', stem.rpartition('.')[2])}.blocks()")
        self.program.weights[value.name] = value
        return ParamRef(value.name, tuple(value.type.concrete({})))

    def pack_params(self, params: Sequence[Param]) -> Operand | None:
        """Return `params` concatenated along axis 0 as one operand; None if they cannot be packed. They must all be
        weights, or all biases, of sibling modules; if one is in quantized blocks, all must have its block layout."""
        params = list(dict.fromkeys(params))
        if len(params) == 1:
            return self.get_weight(params[0])
        places = [p.name.split(".") for p in params]
        if len({(*p[:-2], p[-1]) for p in places}) != 1 or any(len(p) < 2 for p in places):
            return None
        modules, kind = [p[-2] for p in places], places[0][-1]
        if kind not in ("weight", "bias"):
            return None
        joined = ("" if all(len(m) == 1 for m in modules) else "_").join(modules)
        name = f"{joined}_" if keyword.iskeyword(joined) else joined  # i and f of an LSTM
        layouts = {find_layout(p) for p in params}
        blocks = any(isinstance(layout, BlockLayout) for layout in layouts)
        if blocks and len(layouts) > 1:
            return None
        function = "pack_bias" if kind == "bias" else "pack_blocks" if blocks else "pack"
        init = f"{function}({', '.join(write_attribute('{0}', m) for m in modules)})"
        return Submodule(".".join([*places[0][:-2], f"{name}_{kind}"]), init)

    def make_norm(self, kind: str, eps: float, gain: Value | None = None, shift: Value | None = None) -> Submodule:
        """Return a norm of `kind` "rms" or "layer" as kernels take it; weight `gain` and bias `shift` are optional."""
        assert all(w is None or isinstance(w, Param) for w in (gain, shift))
        paths = ["" if w is None else w.name for w in (gain, shift)]
        path = next((g.rpartition(".")[0] for g in paths if g), None) or self._find_plain_norm(kind, eps)
        named = ((prefix, g.rpartition(".")[2]) for prefix, g in zip(("", "shift="), paths, strict=True) if g)
        arguments = [f'"{kind}"', *(prefix + write_attribute("{0}", last) for prefix, last in named)]
        return Submodule(f"{path}.norm", f"Norm({', '.join(arguments)}, eps={eps!r})")

    def find_norm(self, node: Node) -> Submodule | None:
        """Return the norm that the fused `node` applies to its first operand; None if it applies none."""
        a, names = node.attrs, {o.name for o in node.op.operands}
        shift = node.operand("norm_bias") if "norm_bias" in names else None
        return None if a["kind"] == "none" else self.make_norm(a["kind"], a["eps"], node.operand("norm_weight"), shift)

    def _find_plain_norm(self, kind: str, eps: float) -> str:
        """Return the path of a norm without weights; norms of one kind and ε in the current node's scope share it."""
        assert self.node is not None
        epsilons = self._norms.setdefault((self.node.scope, kind), [])
        if eps not in epsilons:
            epsilons.append(eps)
        number = epsilons.index(eps) + 1
        return f"{self.node.scope}.norm_{kind}{f'_{number}' if number > 1 else ''}".lstrip(".")

    # -- scopes of statements

    def find_node_scope(self, node: Node, *names: str) -> str:
        """Return the innermost scope that contains `node`, its operands called `names`, and the weights of its norm."""
        operands = {o.name for o in node.op.operands}
        values = (node.operand(name) for name in (*names, "norm_weight", "norm_bias") if name in operands)
        outer, self.scope = self.scope, node.scope
        try:
            return self.find_scope(*map(self.get_weight, values))
        finally:
            self.scope = outer

    def can_move_state(self, node: Node, scope: str) -> bool:
        """Return whether the statement that updates the state of `node` can move out to `scope`. The move must not
        change the order and nesting of the states in the cache, which follow the modules that update them."""
        inner = f"{scope}." if scope else ""
        within = [n for n in self._cache_owners if n.scope == scope or n.scope.startswith(inner)]
        counts = Counter((n.scope, n.op) for n in within)
        runs = math.gcd(*counts.values())  # how often a module with shared weights runs
        if counts[node.scope, node.op] != runs:
            return False
        keys = [key for key in counts for _ in range(counts[key] // runs)]
        places = {key: () if key[0] == scope else tuple(key[0].removeprefix(inner).split(".")) for key in counts}
        moved: dict[tuple[str, Op], tuple[str, ...]] = {**places, (node.scope, node.op): ()}
        return _nest_states([(places[key], key) for key in keys]) == _nest_states([(moved[key], key) for key in keys])

    def find_scope(self, *operands: Operand | None) -> str:
        """Return the innermost scope, never a ModuleList, around the current scope and the weights in `operands`."""
        paths = [o.path.rpartition(".")[0] for o in operands if isinstance(o, (ParamRef, Submodule))]
        columns = zip(*(path.split(".") for path in (self.scope, *paths)), strict=False)
        common = ".".join(column[0] for column in itertools.takewhile(lambda c: len({*c}) == 1, columns))
        return _skip_list(common, paths) if self.scope else self.scope


def _nest_states(states: Sequence[tuple[tuple[str, ...], Hashable]]) -> object:
    """Return the keys of `states`, nested like the states in a cache: one tuple per module with several states. Each
    state is a pair (path of the modules around it, key)."""
    groups = itertools.groupby(enumerate(states), lambda entry: entry[1][0][:1] or entry[0])
    nested: list[object] = []
    for _, group in groups:
        inner = [state for _, state in group]
        nested.append(_nest_states([(path[1:], key) for path, key in inner]) if inner[0][0] else inner[0][1])
    return nested[0] if len(nested) == 1 else tuple(nested)


def _skip_list(scope: str, paths: Sequence[str]) -> str:
    """Return `scope`, or the scope around it if `paths` show that it is a ModuleList, which has no forward."""
    inner = (p.removeprefix(f"{scope}.").split(".")[0] for p in paths if p.startswith(f"{scope}."))
    return scope.rpartition(".")[0] if any(name.isdigit() for name in inner) else scope


Emit = Callable[[StepEmitter, Node], "Operand | tuple[Operand, ...] | None"]
When = Callable[[StepEmitter, Node], "str | None"]


@dataclass(frozen=True)
class StepLowering:
    """A lowering of a fused op: `emit` emits kernel calls for a node; `when` returns a reason to refuse it, or None."""

    emit: Emit
    when: When


STEPS: Registry[StepLowering] = Registry("op of a decode step", "weft.backends.torch.decode.ops", "see `weft ops`")


def step_lowering(*ops: Op, when: When = lambda e, node: None) -> Callable[[Emit], Emit]:
    """Register the decorated function as the lowering of `ops` in decode steps. `when` returns the reason to refuse a
    node, else None. The function emits statements and returns operands for the node's outputs, or None to use the
    model's lowering instead."""

    def register(emit: Emit) -> Emit:
        for op in ops:
            STEPS.add(op.name, StepLowering(emit, when))
        return emit

    return register
