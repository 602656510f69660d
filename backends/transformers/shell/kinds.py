"""The kinds of the caches of a model, as transformers calls them."""

from __future__ import annotations

from dataclasses import replace

from ...torch.codegen.structure import Call, Loop, Method
from ...torch.program.statements import Statement
from ..lower.emitter import CHUNKED, FULL, RECURRENT, SLIDING, ShellEmitter
from .stack import Stack, cache_numbers

NO_CACHE = "moe"  # what transformers calls a layer without a cache


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
