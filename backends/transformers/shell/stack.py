"""The stack of layers of a base model: which class each layer has, and which caches."""

from __future__ import annotations

from dataclasses import dataclass

from ...torch.codegen.structure import Call, Loop, Method
from ...torch.program.statements import CacheSlot, Statement
from ..lower.emitter import Attending, ShellEmitter


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


def _caches_each(calls: list[Call], e: ShellEmitter) -> int | None:
    counts = {cache_count(c.callee, e) for c in calls}
    return 1 if counts <= {0, 1} else counts.pop() if len(counts) == 1 else None


def cache_count(method: Method, e: ShellEmitter) -> int:
    """Count the caches of a method: one for each attention, and one for all recurrences of a module."""
    return sum(n for _, n in cache_items(method, e))


def cache_items(method: Method, e: ShellEmitter) -> list[tuple[object, int]]:
    """The statements and calls of a method that keep something, each with the number of its caches; the recurrences of
    a module share that of the first, until one runs again."""
    found: list[tuple[object, int]] = []
    states: set[int] = set()
    for item in method.items:
        if isinstance(item, Statement):
            if not keeps(item):
                continue
            state = e.recurrent.get(item)
            new = state is None or not states or state in states
            if state is not None:
                states = {state} if new else {*states, state}
            found.append((item, int(new)))
        else:
            calls = item.calls if isinstance(item, Loop) else [item]
            found += [(c, cache_count(c.callee, e)) for c in calls]
    return found


def keeps(statement: Statement) -> bool:
    """Return whether a statement keeps something from call to call."""
    return bool(statement.results) and any(isinstance(o, CacheSlot) for o in statement.operands)


def attends(method: Method, e: ShellEmitter) -> list[tuple[Statement, Attending]]:
    """The statements of a method itself that attend."""
    return [(i, e.attending[i]) for i in method.items if isinstance(i, Statement) and i in e.attending]
