"""Group flat statements into classes: the statements of a scope become a method, and equal methods share a class.

A scope becomes a module if it has weights and its statements can run as one call; otherwise they stay in the enclosing
scope, which accesses the weights by path. Layers that run the same statements on the same weights several times become
several calls of one module.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from ..program.statements import (
    TOP,
    CacheSlot,
    Operand,
    ParamRef,
    Program,
    Statement,
    Submodule,
    Var,
    is_inside,
    relative_to,
)


@dataclass(eq=False, repr=False)
class ModuleCall:
    """A call of `callee`, the forward of the module at `path`, which maps `inputs` to `results`."""

    path: str
    callee: Method
    inputs: list[Operand]
    results: tuple[Var, ...]

    @property
    def calls(self) -> list[ModuleCall]:
        return [self]  # as a loop has calls

    @property
    def slots(self) -> int:
        return self.callee.slots


@dataclass(eq=False, repr=False)
class Loop:
    """Consecutive calls of modules that become one `for` loop: every call reads all results of the previous call."""

    calls: list[ModuleCall]
    chained: list[int]  # for each result of a call, the index of the next call's input

    @property
    def results(self) -> tuple[Var, ...]:
        return self.calls[-1].results

    @property
    def slots(self) -> int:
        return self.calls[0].slots


Item = Statement | ModuleCall | Loop


@dataclass(eq=False, repr=False)
class Method:
    """The forward of the module at `path`, with its `items` in order. Methods with equal `key` can share a class."""

    path: str
    items: list[Item]
    inputs: list[Var | ParamRef] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    members: dict[str, Submodule | ParamRef] = field(default_factory=dict)  # by path, without members of inner methods
    modules: dict[str, Method] = field(default_factory=dict)  # by path
    key: Hashable = None

    @property
    def slots(self) -> int:
        """Return the number of items with states. If it is 1, the cache is the item's state, else a tuple of states."""
        return len(self.stateful)

    @property
    def stateful(self) -> list[Item]:
        return [i for i in self.items if has_state(i)]

    def walk(self) -> Iterator[Method]:
        """Yield the inner methods, innermost first, then this method."""
        for inner in self.modules.values():
            yield from inner.walk()
        yield self


def has_state(item: Item) -> bool:
    """Return whether `item` reads a cache or state; False for statements without results, such as the cache advance."""
    if isinstance(item, Statement):
        return any(isinstance(o, CacheSlot) for o in item.operands) and bool(item.results)
    return item.slots > 0


def group_statements(program: Program, borrows: bool = False) -> Method:
    """Group the statements of `program` into methods, and return the method of the whole model. A weight is a member of
    the innermost module around it; with `borrows`, of each module around it whose own statements read it."""
    members: dict[str, Submodule | ParamRef] = {}
    for o in (*(o for s in program.statements for o in s.operands), *program.outputs.values()):
        if isinstance(o, (Submodule, ParamRef)):
            members.setdefault(o.path, o)
    leaves = {f"{path}.{name}" for path, o in members.items() if isinstance(o, Submodule) for name in o.tensors}
    members = {path: o for path, o in members.items() if path not in leaves}
    builder = _StructureBuilder(program, members, borrows)
    return builder.build_method(TOP, program.statements, list(program.outputs.values()))


class _StructureBuilder:
    def __init__(self, program: Program, members: dict[str, Submodule | ParamRef], borrows: bool) -> None:
        self.members = members
        self.borrows = borrows
        owners = {p for path in members for p in _iterate_ancestors(path)}
        scopes = {s.scope for s in program.statements}
        used = {p for s in scopes for p in (*_iterate_ancestors(s), s)}
        # A ModuleList has no forward: its statements stay with the scope around it.
        self.modules = {p for p in used & owners if not p or not _is_list(p, used | owners)}
        self.uses: dict[Operand, set[Statement | None]] = {}  # the readers of each operand; None: it is an output
        reads: list[tuple[Operand, Statement | None]] = [(o, s) for s in program.statements for o in s.operands]
        for o, reader in (*reads, *((o, None) for o in program.outputs.values())):
            self.uses.setdefault(o, set()).add(reader)

    def build_method(self, path: str, statements: Sequence[Statement], outputs: list[Operand]) -> Method:
        """Return the method of the module at `path`, which runs `statements` and returns `outputs`."""
        items: list[Item] = []
        modules: dict[str, Method] = {}
        for child, members in _sort_groups(self._group(path, statements)):
            if child is None:
                items.append(members[0])
                continue
            call = self._build_call(child, members)
            # Shared layers are several calls of one module, so they need one method.
            call.callee = modules.setdefault(child, call.callee)
            items.append(call)
        method = Method(path, _roll_loops(items), outputs=outputs, modules=modules)
        method.members = self._find_members(method)
        method.inputs = _find_inputs(method)
        method.key = _make_key(method)
        return method

    def _find_members(self, method: Method) -> dict[str, Submodule | ParamRef]:
        if self.borrows:
            operands = (o for item in method.items for o in iter_operands(item))
            members = (o for o in (*operands, *method.outputs) if isinstance(o, (Submodule, ParamRef)))
            return {o.path: o for o in members if is_inside(o.path, method.path)}
        below = {p: member for p, member in self.members.items() if is_inside(p, method.path)}
        return {p: member for p, member in below.items() if not any(is_inside(p, m) for m in method.modules)}

    def _build_call(self, path: str, members: list[Statement]) -> ModuleCall:
        results = [v for s in members for v in s.results]
        mine = set(members)
        outputs: list[Operand] = [v for v in results if not self.uses.get(v, set()) <= mine]
        outputs.sort(key=lambda v: isinstance(v, Var) and self._is_only_forwarded(v, mine))
        callee = self.build_method(path, members, outputs)
        return ModuleCall(path, callee, list(callee.inputs), tuple(v for v in outputs if isinstance(v, Var)))

    def _is_only_forwarded(self, v: Var, mine: set[Statement]) -> bool:
        """Return whether `v` is not an output, and outside of `mine` only statements without text read it."""
        return all(s is not None and (s in mine or not s.text) for s in self.uses[v])

    def _group(self, path: str, statements: Sequence[Statement]) -> list[tuple[str | None, list[Statement]]]:
        """Return pairs (path of an inner module, the statements of one call) in order of appearance. Each statement of
        `path` itself is a pair (None, [statement]). So is each statement of inner modules that depend on each other in
        a cycle: such a module cannot be one call."""
        inner = {p for p in self.modules if p != path and is_inside(p, path)}
        flat: set[str] = set()  # inner modules that cannot be one call
        while True:
            direct = {p for p in inner - flat if not any(is_inside(p, q) for q in inner - flat)}
            groups = list(_group_by_module(statements, direct))
            cycles = (c for c in nx.strongly_connected_components(_build_dependencies(groups)) if len(c) > 1)
            cyclic = {name for c in cycles for i in c if (name := groups[i][0]) is not None}
            if not cyclic:
                return groups
            # Modules that depend on each other cannot each be one call: their statements go to this method instead.
            flat |= cyclic


def _group_by_module(
    statements: Sequence[Statement], modules: set[str]
) -> Iterator[tuple[str | None, list[Statement]]]:
    groups: dict[str | Statement, list[Statement]] = {}
    for s in statements:
        around = (s.scope, *reversed(list(_iterate_ancestors(s.scope))))
        groups.setdefault(next((p for p in around if p in modules), s), []).append(s)
    for owner, group in groups.items():
        if isinstance(owner, Statement):
            yield None, group
        else:
            yield from ((owner, run) for run in _split_repeats(group))


def _split_repeats(statements: list[Statement]) -> list[list[Statement]]:
    """Return `statements` as equal consecutive runs over the same weights, or as one run if they do not repeat."""
    keys = [(s.text, s.scope, tuple(o for o in s.operands if isinstance(o, (Submodule, ParamRef)))) for s in statements]
    n = len(keys)
    for size in range(1, n // 2 + 1):
        if n % size == 0 and keys[size:] == keys[:-size]:
            # Repeated statements without weights are not a repeated module.
            if any(k[2] for k in keys[:size]):
                return [statements[i : i + size] for i in range(0, n, size)]
            break
    return [statements]


def _build_dependencies(groups: Sequence[tuple[str | None, list[Statement]]]) -> nx.DiGraph:
    maker = {v: i for i, (_, members) in enumerate(groups) for s in members for v in s.results}
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    for i, (_, members) in enumerate(groups):
        for s in members:
            for o in s.operands:
                if isinstance(o, Var) and maker.get(o, i) != i:
                    graph.add_edge(maker[o], i)
    return graph


def _sort_groups(groups: list[tuple[str | None, list[Statement]]]) -> list[tuple[str | None, list[Statement]]]:
    early = [name is None and members[0].early for name, members in groups]
    # The order of the graph as far as dependencies allow, with statements that layers share first.
    order = nx.lexicographical_topological_sort(_build_dependencies(groups), key=lambda i: (not early[i], i))
    return [groups[i] for i in order]


def _iterate_ancestors(path: str) -> Iterator[str]:
    """Yield the scopes around `path`, outermost ("") first; `path` is not included."""
    if path:
        yield from ("", *itertools.accumulate(path.split(".")[:-1], "{}.{}".format))


def _is_list(path: str, paths: set[str]) -> bool:
    """Return whether a path in `paths` is a child of `path` with an index as its name, as in a ModuleList."""
    return any(p.rpartition(".")[0] == path and p.rpartition(".")[2].isdigit() for p in paths)


def _find_inputs(method: Method) -> list[Var | ParamRef]:
    results = {v for i in method.items for v in i.results}
    operands = [o for item in method.items for o in iter_operands(item)]
    operands += [o for o in method.outputs if isinstance(o, Var)]
    inputs = dict.fromkeys(o for o in operands if isinstance(o, (Var, ParamRef)) and o not in results)
    return [o for o in inputs if isinstance(o, Var) or not is_inside(o.path, method.path)]


def iter_operands(item: Item) -> Iterator[Operand]:
    """Yield the operands of `item` in order, except results that one call of a loop passes to the next."""
    if isinstance(item, Loop):
        results: set[Var] = set()
        for call in item.calls:
            yield from (o for o in call.inputs if o not in results)
            results.update(call.results)
    else:
        yield from item.operands if isinstance(item, Statement) else item.inputs


def _roll_loops(items: list[Item]) -> list[Item]:
    """Return `items` with loops for runs of chained calls of successive modules of a list, or of one module."""
    users = Counter(o for item in items for o in {*iter_operands(item)})
    rolled: list[Item] = []
    for run in _split_call_runs(items):
        loop = _make_loop(run, users) if len(run) > 1 else None
        rolled += run if loop is None else [loop]
    return rolled


def _split_call_runs(items: list[Item]) -> Iterator[list[Item]]:
    run: list[Item] = []
    for item in items:
        if run and not _is_next_call(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _is_next_call(item: Item, after: Item) -> bool:
    if not isinstance(item, ModuleCall) or not isinstance(after, ModuleCall):
        return False
    stem, _, number = item.path.rpartition(".")
    return after.path == item.path or (number.isdigit() and after.path == f"{stem}.{int(number) + 1}")


def _make_loop(run: list[Item], users: Counter[Operand]) -> Loop | None:
    calls = [c for c in run if isinstance(c, ModuleCall)]
    same = len({c.path for c in calls}) == 1
    if not same and len({c.path for c in calls}) != len(calls):
        return None
    if len({len(c.results) for c in calls}) != 1 or len({c.slots for c in calls}) != 1:
        return None
    chained: list[int] = []
    for j in range(len(calls[0].results)):
        places = []
        for before, after in itertools.pairwise(calls):
            var = before.results[j]
            # A loop keeps only its last result: a value with other readers must not disappear in it.
            if users[var] != 1 or after.inputs.count(var) != 1:
                return None
            places.append(after.inputs.index(var))
        if len({*places}) != 1 or places[0] >= len(calls[0].inputs) or not isinstance(calls[0].inputs[places[0]], Var):
            return None
        chained.append(places[0])
    return Loop(calls, chained) if chained and len({*chained}) == len(chained) else None


def _make_key(method: Method) -> Hashable:
    """Return a hash that is equal for methods that can share a class."""
    number: dict[Operand, int] = {v: i for i, v in enumerate(method.inputs)}

    def ref(o: Operand) -> Hashable:
        if isinstance(o, Submodule):
            return relative_to(o.path, method.path), o.init
        if isinstance(o, ParamRef) and is_inside(o.path, method.path):
            # Relative, so that layers that differ in their number only have one class.
            return replace(o, path=relative_to(o.path, method.path))
        return o if isinstance(o, CacheSlot) else number[o]

    def key(item: Item) -> Hashable:
        if isinstance(item, Loop):
            return tuple(key(c) for c in item.calls)
        if isinstance(item, Statement):
            identity: Hashable = (item.text, item.comment, item.replaces, tuple(ref(o) for o in item.operands))
        else:
            identity = (relative_to(item.path, method.path), item.callee.key, tuple(ref(o) for o in item.inputs))
        for v in item.results:
            number[v] = len(number)
        return identity

    steps = tuple(key(item) for item in method.items)
    members = tuple(replace(h, path=relative_to(p, method.path)) for p, h in method.members.items())
    return hash((steps, members, tuple(ref(o) for o in method.outputs)))
