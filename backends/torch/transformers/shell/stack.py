"""The stack of layers of a base model: which class each layer has, and which caches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...codegen.structure import Call, Loop, Method
from ...program.statements import CacheSlot, Program, Statement, Var
from ..lower.emitter import CHUNKED, FULL, RECURRENT, SLIDING, Attending, ShellEmitter

NO_CACHE = "moe"  # what transformers calls a layer without a cache


@dataclass
class Stack:
    """The list of modules at `path` whose `calls` are the layers of a model, one after the other.

    `caches` is how many caches of keys, or of states, a layer has; None where layers differ in more than one.
    """

    path: str
    calls: list[Call]
    caches: int | None

    def __len__(self) -> int:
        return len(self.calls)


def stack_of(top: Method, e: ShellEmitter) -> Stack | None:
    """The layers of the model `top`: its longest loop over a whole list of modules; None if it has none."""
    loops = [item for item in top.items if isinstance(item, Loop)]
    fitting = []
    for loop in loops:
        paths = [c.path for c in loop.calls]
        stem = paths[0].rpartition(".")[0]
        listed = [p for p in top.modules if p.rpartition(".")[0] == stem]
        if stem and paths == [f"{stem}.{i}" for i in range(len(paths))] and len(listed) == len(paths):
            fitting.append(Stack(stem, loop.calls, _caches_each(loop.calls, e)))
    return max(fitting, key=len, default=None)


def loop_single_layers(top: Method, program: Program) -> None:
    """Let a list of one module be run in a loop, too: a config may ask for more of them."""
    shapes = {s.results[0]: s.node.output.shape for s in program.statements if s.results and s.node and not s.early}
    for i, item in enumerate(top.items):
        stem, _, number = item.path.rpartition(".") if isinstance(item, Call) else ("", "", "")
        if not isinstance(item, Call) or number != "0" or len(item.results) != 1:
            continue
        listed = [p for p in (*top.modules, *top.holds) if p.startswith(f"{stem}.")]
        made = shapes.get(item.results[0])
        alike = [j for j, o in enumerate(item.inputs) if isinstance(o, Var) and made in (o.shape, shapes.get(o))]
        if made is not None and listed == [item.path] and len(alike) == 1:
            top.items[i] = Loop([item], alike)


def _caches_each(calls: list[Call], e: ShellEmitter) -> int | None:
    counts = {cache_numbers(c.callee, e).count for c in calls}
    return 1 if counts <= {0, 1} else counts.pop() if len(counts) == 1 else None


@dataclass
class CacheNumbers:
    """The numbers of the caches of a method, counted within it: of each statement that keeps something, and the first
    of each call; how many there are of its `own` text, and of a `source`, which are kept under the same numbers."""

    first: dict[object, int] = field(default_factory=dict)
    own: int = 0
    source: int = 0

    @property
    def count(self) -> int:
        return max(self.own, self.source)

    def add(self, item: object, own: int, source: int) -> None:
        """Number what needs so many of both."""
        if own and source:
            self.own = self.source = self.count
        self.first[item] = self.own if own or not source else self.source
        self.own, self.source = self.own + own, self.source + source


def cache_numbers(method: Method, e: ShellEmitter, stack: Stack | None = None) -> CacheNumbers:
    """Number the caches of a method: one for each attention, and one for all recurrences of a module, until one runs
    again. Each layer of the `stack` has numbers of its own, at least one."""
    numbers = CacheNumbers()
    states: set[int] = set()
    shared = 0
    for item in method.items:
        if isinstance(item, Statement):
            state = e.recurrent.get(item)
            if not keeps(item):
                continue
            if state is not None and states and state not in states:
                states.add(state)
                numbers.first[item] = shared
                continue
            if state is not None:
                states, shared = {state}, numbers.own
            numbers.add(item, int(item not in e.crossed), int(item in e.crossed))
        elif isinstance(item, Call):
            inner = cache_numbers(item.callee, e)
            alike = inner.own and inner.source
            numbers.add(item, inner.count if alike else inner.own, inner.count if alike else inner.source)
        else:
            for call in item.calls:
                count = cache_numbers(call.callee, e).count
                count = max(1, count) if stack is not None and item.calls is stack.calls else count
                numbers.add(call, count, count)
    return numbers


def keeps(statement: Statement) -> bool:
    """Return whether a statement keeps something from call to call."""
    return bool(statement.results) and any(isinstance(o, CacheSlot) for o in statement.operands)


def attends(method: Method, e: ShellEmitter) -> list[tuple[Statement, Attending]]:
    """The statements of a method itself that attend."""
    return [(i, e.attending[i]) for i in method.items if isinstance(i, Statement) and i in e.attending]


def cache_kinds(method: Method, e: ShellEmitter, stack: Stack | None = None) -> list[str]:
    """The kind of each cache of a method, in their order; also for layers of the `stack` without one."""
    numbers = cache_numbers(method, e, stack)
    kinds = [NO_CACHE] * numbers.count
    for item, first in numbers.first.items():
        if isinstance(item, Call):
            found = {first + i: kind for i, kind in enumerate(cache_kinds(item.callee, e))}
            kinds = [found[i] if found.get(i, NO_CACHE) != NO_CACHE else kind for i, kind in enumerate(kinds)]
        elif isinstance(item, Statement) and item not in e.crossed:
            kinds[first] = RECURRENT if item in e.recurrent else _kind(item, e)
    return kinds


def around(top: Method, e: ShellEmitter, stack: Stack) -> tuple[list[str], list[str]]:
    """The kinds of the caches before and behind those of the stack."""
    place = next(i for i, item in enumerate(top.items) if isinstance(item, Loop) and item.calls is stack.calls)
    before, after = (replace(top, items=part) for part in (top.items[:place], top.items[place + 1 :]))
    return cache_kinds(before, e), cache_kinds(after, e)


def block_kinds(block: Method, e: ShellEmitter) -> list[str]:
    """The kinds of the caches of one block; of one without any, what stands for none."""
    return cache_kinds(block, e) or [NO_CACHE]


def _kind(statement: Statement, e: ShellEmitter) -> str:
    """The kind of the cache of an attention."""
    mask = next((m for m in e.masks.values() if statement.node is not None and statement.node in m.nodes), None)
    return mask.kind if mask is not None and mask.kind in (SLIDING, CHUNKED) else FULL
