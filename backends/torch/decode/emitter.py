"""An emitter whose statements read the weights of a model that is there already, several of them as one."""

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
from weft.ir.types.block_layouts import BlockLayout
from weft.passes.analysis.states import caches, keeper

from ..program.emitter import Emitter, local_name
from ..program.positions import query_positions
from ..program.quantized import kept
from ..program.statements import TOP, Operand, ParamRef, Statement, Submodule, Var
from ..program.states import cached_nodes, counts_keys
from .members import member
from .tables import TICKETS

Refusal = Callable[[torch.dtype], "str | None"]  # why there is no kernel for weights of this dtype, if there is none


@dataclass
class Choice:
    """The choice of what computes `node` in a decode step: `kernel`, unless one of `refusals` gives a reason; or torch,
    and `reason` says why."""

    node: Node
    kernel: str = ""
    reason: str = ""
    refusals: tuple[Refusal, ...] = ()


class StepEmitter(Emitter):
    """An emitter of the fused `graph` of a model, whose modules are those of the model; `choices` tells what it chose
    for which node.

    The `init` of its `Submodule`s is an expression in which ``{0}`` stands for the model's module around their path.

    One that `reads_prompts` writes for several tokens of each row. `float8_caches` is as for the model.
    """

    def __init__(
        self,
        graph: Graph,
        functions: Mapping[str, str],
        reads_prompts: bool = False,
        float8_caches: bool = False,
    ) -> None:
        cached = cached_nodes(graph)
        super().__init__(graph, cached, counts_keys(graph, cached), float8_caches=float8_caches)
        self.program.functions, self.reads_prompts = dict(functions), reads_prompts
        self._keepers = [*dict.fromkeys(keeper(n) if caches(n) else n for n in graph.nodes if n in cached)]
        self.choices: list[Choice] = []
        self.kernels: dict[str, str] = {}  # that are generated for this model: text by name
        self.kept: dict[Node, Var] = {}  # caches that other attentions read, too
        self.most_tickets = 0
        self._norms: dict[tuple[str, str], list[float]] = {}  # ε of those without weights, by scope and kind
        self._begin()

    def give(self, name: str, default: str, type: str) -> Var:
        if name == "last":
            return super().give(name, default, type)
        return super().give(name, "", type.removesuffix(" | None"))

    def leaf(self, init: str, **weights: Value | None) -> Submodule | None:
        found = super().leaf(init, **weights)
        return None if found is None else Submodule(f"{found.path}.module", "{0}", found.holds)

    def _begin(self) -> None:
        """A step is given all there is: positions, and a cache, which counts the tokens."""
        positions = self.give("position_ids", "", "Tensor")
        self._hoisted["position_ids"] = self._hoisted["written"] = (positions,)
        self.start = self.emit(*self._counting(), name="start")
        self.start.type = "int"

    def ended(self, statements: list[Statement]) -> list[Statement]:
        """`statements`, the tokens counted also where nothing asks how many there were."""
        if any(self.start in s.results for s in statements):
            return statements
        text, *operands = self._counting()
        return [Statement(text, tuple(operands), (), TOP), *statements]

    def _counting(self) -> tuple[str, *tuple[Var, ...]]:
        """The text that counts the tokens of a call, and gives how many there were before; and its operands."""
        cache = self.give("cache", "", "Cache")
        if not self.reads_prompts:
            return "{0}.advance(1)", cache
        return "{0}.advance({1}.shape[1])", cache, self.give("input_ids", "", "Tensor")

    @property
    def positions(self) -> Operand:
        """The positions of the tokens of each row, [batch, seq]."""
        return query_positions(self)

    def tickets(self, each: int) -> Var:
        """Counters that kernels share, `each` of them and more for every row."""
        self.most_tickets = max(self.most_tickets, each)
        tokens = self.give("input_ids", "", "Tensor")
        return self.hoist("tickets", "{0}({1})", TICKETS, tokens, name="tickets")

    def chose(self, kernel: str, *refusals: Refusal) -> None:
        """Note that `kernel` computes the node at hand."""
        assert self.node is not None
        self.chose_for(self.node, kernel, *refusals)

    def chose_for(self, node: Node, kernel: str, *refusals: Refusal) -> None:
        """Note that `kernel` computes `node`, within the statement of the node at hand."""
        self.choices.append(Choice(node, kernel, refusals=refusals))

    def declined(self, reason: str) -> None:
        """Note why no kernel computes the node at hand."""
        assert self.node is not None
        self.choices.append(Choice(self.node, reason=reason))

    def pending(self, node: Node) -> tuple[Var, ...]:
        """Return placeholders for the outputs of `node`, whose call is an argument in the statement of their reader."""
        return tuple(Var(local_name(value)) for value in node.outputs)

    # -- what kernels read

    def weight(self, value: Value | None) -> Operand | None:
        """A weight as it is, if there is one, or packed ones; or the codes of one that stays in blocks."""
        if value is None:
            return None
        if not isinstance(value, Param):
            made = value.producer
            assert made is not None and made.op is ops.pack
            return self.packed([w for w in made.inputs if isinstance(w, Param)])
        if isinstance(kept(value), BlockLayout):
            stem = value.name.removesuffix(".weight")
            return Submodule(f"{stem}_blocks", f"{{0}}{member(stem.rpartition('.')[2])}.blocks()")
        self.program.weights[value.name] = value
        return ParamRef(value.name, tuple(value.type.concrete({})))

    def packed(self, params: Sequence[Param]) -> Operand | None:
        """Weights one under the other, held beside their modules; None if those do not stand side by side."""
        params = list(dict.fromkeys(params))
        if len(params) == 1:
            return self.weight(params[0])
        places = [p.name.split(".") for p in params]
        if len({(*p[:-2], p[-1]) for p in places}) != 1 or any(len(p) < 2 for p in places):
            return None
        modules, kind = [p[-2] for p in places], places[0][-1]
        if kind not in ("weight", "bias"):
            return None
        joined = ("" if all(len(m) == 1 for m in modules) else "_").join(modules)
        name = f"{joined}_" if keyword.iskeyword(joined) else joined  # i and f of an LSTM
        layouts = {kept(p) for p in params}
        blocks = any(isinstance(layout, BlockLayout) for layout in layouts)
        if blocks and len(layouts) > 1:
            return None
        function = "pack_bias" if kind == "bias" else "pack_blocks" if blocks else "pack"
        init = f"{function}({', '.join('{0}' + member(m) for m in modules)})"
        return Submodule(".".join([*places[0][:-2], f"{name}_{kind}"]), init)

    def norm(self, kind: str, eps: float, gain: Value | None = None, shift: Value | None = None) -> Submodule:
        """Return a norm as kernels take it, with its weight `gain` and its bias `shift`, parameters both."""
        assert all(w is None or isinstance(w, Param) for w in (gain, shift))
        given = ["" if w is None else w.name for w in (gain, shift)]
        path = next((g.rpartition(".")[0] for g in given if g), None) or self._without_weights(kind, eps)
        named = ((prefix, g.rpartition(".")[2]) for prefix, g in zip(("", "shift="), given, strict=True) if g)
        arguments = [f'"{kind}"', *(f"{prefix}{{0}}{member(last)}" for prefix, last in named)]
        return Submodule(f"{path}.norm", f"Norm({', '.join(arguments)}, eps={eps!r})")

    def norm_of(self, node: Node) -> Submodule | None:
        """Return the norm that a fused `node` applies to its first operand, or None."""
        a, names = node.attrs, {o.name for o in node.op.operands}
        shift = node.operand("norm_bias") if "norm_bias" in names else None
        return None if a["kind"] == "none" else self.norm(a["kind"], a["eps"], node.operand("norm_weight"), shift)

    def _without_weights(self, kind: str, eps: float) -> str:
        """Return where a norm without weights stands: one for all that are alike in a scope, which may be run again."""
        assert self.node is not None
        alike = self._norms.setdefault((self.node.scope, kind), [])
        if eps not in alike:
            alike.append(eps)
        number = alike.index(eps) + 1
        return f"{self.node.scope}.norm_{kind}{f'_{number}' if number > 1 else ''}".lstrip(".")

    # -- where statements stand

    def within(self, *operands: Operand | None) -> None:
        """Let what follows stand in the innermost scope that has all weights among `operands`."""
        self.scope = self.around(*operands)

    def around_all(self, node: Node, *names: str) -> str:
        """Return the innermost scope that contains `node`, its operands called `names` and the weights of its norm."""
        known = {o.name for o in node.op.operands}
        values = (node.operand(name) for name in (*names, "norm_weight", "norm_bias") if name in known)
        outer, self.scope = self.scope, node.scope
        try:
            return self.around(*map(self.weight, values))
        finally:
            self.scope = outer

    def moves(self, node: Node, scope: str) -> bool:
        """Return whether the statement that keeps the state of `node` may move out to `scope`, one of the scopes
        around it, without a change of the nesting of the cache."""
        inner = f"{scope}." if scope else ""
        within = [n for n in self._keepers if n.scope == scope or n.scope.startswith(inner)]
        counts = Counter((n.scope, n.op) for n in within)
        runs = math.gcd(*counts.values())  # of a module that runs several times
        if counts[node.scope, node.op] != runs:
            return False
        kept = [key for key in counts for _ in range(counts[key] // runs)]
        places = {key: () if key[0] == scope else tuple(key[0].removeprefix(inner).split(".")) for key in counts}
        moved: dict[tuple[str, Op], tuple[str, ...]] = {**places, (node.scope, node.op): ()}
        return _nested([(places[key], key) for key in kept]) == _nested([(moved[key], key) for key in kept])

    def around(self, *operands: Operand | None) -> str:
        """The innermost scope around the present one that has all weights among `operands`."""
        paths = [o.path.rpartition(".")[0] for o in operands if isinstance(o, (ParamRef, Submodule))]
        return _module(_outer(self.scope, *paths), paths) if self.scope else self.scope


def _nested(kept: Sequence[tuple[tuple[str, ...], Hashable]]) -> object:
    """Nest `kept` states, each with the modules around it, as a cache does: a tuple for a module that has several."""
    groups = itertools.groupby(enumerate(kept), lambda entry: entry[1][0][:1] or entry[0])
    found: list[object] = []
    for _, group in groups:
        inner = [state for _, state in group]
        found.append(_nested([(path[1:], key) for path, key in inner]) if inner[0][0] else inner[0][1])
    return found[0] if len(found) == 1 else tuple(found)


def _outer(*paths: str) -> str:
    """The innermost scope around all of `paths`."""
    common = []
    for column in zip(*(p.split(".") for p in paths), strict=False):
        if len({*column}) != 1:
            break
        common.append(column[0])
    return ".".join(common)


def _module(scope: str, paths: Sequence[str]) -> str:
    """`scope`, or what is around it if it only numbers its modules: a list computes nothing."""
    inner = (p.removeprefix(f"{scope}.").split(".")[0] for p in paths if p.startswith(f"{scope}."))
    return scope.rpartition(".")[0] if any(name.isdigit() for name in inner) else scope
