"""The stack (list of layers) of a base model, and the numbers and kinds of its caches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...codegen.structure import Loop, Method, ModuleCall
from ...program.statements import CacheSlot, Program, Statement, Var
from ..lower.model_emitter import CHUNKED, FULL, RECURRENT, SLIDING, AttentionRecord, HFEmitter

NO_CACHE = "moe"  # transformers' kind of a layer without a cache


@dataclass
class Stack:
    """The list of layers of a model: modules `path`.0, `path`.1, …, which `calls` call in order.

    caches: number of caches of each layer; 1 also if some layers have none, None if layers differ otherwise.
    """

    path: str
    calls: list[ModuleCall]
    caches: int | None

    def __len__(self) -> int:
        return len(self.calls)


def find_stack(top: Method, e: HFEmitter) -> Stack | None:
    """Return the longest loop of the forward `top` over all modules of a list; None without such a loop."""
    fitting = []
    for loop in (item for item in top.items if isinstance(item, Loop)):
        paths = [c.path for c in loop.calls]
        stem = paths[0].rpartition(".")[0]
        listed = [p for p in top.modules if p.rpartition(".")[0] == stem]
        if stem and paths == [f"{stem}.{i}" for i in range(len(paths))] and len(listed) == len(paths):
            fitting.append(Stack(stem, loop.calls, _count_layer_caches(loop.calls, e)))
    return max(fitting, key=len, default=None)


def loop_single_layers(top: Method, program: Program) -> None:
    """Replace calls of a ModuleList's only module in `top` by a loop, in place, so that a config may set more layers.
    Only modules are replaced that have exactly one input of the shape of their result."""
    shapes = {s.results[0]: s.node.output.shape for s in program.statements if s.results and s.node and not s.early}
    for i, item in enumerate(top.items):
        stem, _, number = item.path.rpartition(".") if isinstance(item, ModuleCall) else ("", "", "")
        if not isinstance(item, ModuleCall) or number != "0" or len(item.results) != 1:
            continue
        listed = [p for p in (*top.modules, *top.members) if p.startswith(f"{stem}.")]
        shape = shapes.get(item.results[0])
        alike = [j for j, o in enumerate(item.inputs) if isinstance(o, Var) and shape in (o.shape, shapes.get(o))]
        if shape is not None and listed == [item.path] and len(alike) == 1:
            top.items[i] = Loop([item], alike)


def _count_layer_caches(calls: list[ModuleCall], e: HFEmitter) -> int | None:
    counts = {number_caches(c.callee, e).count for c in calls}
    return 1 if counts <= {0, 1} else counts.pop() if len(counts) == 1 else None


@dataclass
class CacheNumbers:
    """The cache numbers (layer_idx) within a method, from 0.

    first: module call, or statement with a cache → number of its first cache. self_count: next number in the cache of
    self-attention and states. cross_count: next number in the cache of cross-attention, a separate object.
    """

    first: dict[object, int] = field(default_factory=dict)
    self_count: int = 0
    cross_count: int = 0

    @property
    def count(self) -> int:
        return max(self.self_count, self.cross_count)

    def add(self, item: object, attention: int, cross: int) -> None:
        """Assign the next numbers to `item`, with `attention` self-attention and `cross` cross-attention caches; if it
        has both, both start at the same number."""
        if attention and cross:
            self.self_count = self.cross_count = self.count
        self.first[item] = self.self_count if attention or not cross else self.cross_count
        self.self_count, self.cross_count = self.self_count + attention, self.cross_count + cross


def number_caches(method: Method, e: HFEmitter, stack: Stack | None = None) -> CacheNumbers:
    """Return the cache numbers of `method`. Each attention has its own. Recurrences share one until a state index
    (`HFEmitter.recurrent`) repeats. Each layer of the `stack` has at least one number, also without a cache."""
    numbers = CacheNumbers()
    states: set[int] = set()
    shared = 0
    for item in method.items:
        if isinstance(item, Statement):
            state = e.recurrent.get(item)
            if not has_cache_slot(item):
                continue
            if state is not None and states and state not in states:
                states.add(state)
                numbers.first[item] = shared
                continue
            if state is not None:
                states, shared = {state}, numbers.self_count
            numbers.add(item, int(item not in e.cross_writes), int(item in e.cross_writes))
        elif isinstance(item, ModuleCall):
            inner = number_caches(item.callee, e)
            alike = inner.self_count and inner.cross_count
            numbers.add(item, inner.count if alike else inner.self_count, inner.count if alike else inner.cross_count)
        else:
            for call in item.calls:
                count = number_caches(call.callee, e).count
                count = max(1, count) if stack is not None and item.calls is stack.calls else count
                numbers.add(call, count, count)
    return numbers


def has_cache_slot(statement: Statement) -> bool:
    """Return whether `statement` has results and reads a cache or state."""
    return bool(statement.results) and any(isinstance(o, CacheSlot) for o in statement.operands)


def list_attentions(method: Method, e: HFEmitter) -> list[tuple[Statement, AttentionRecord]]:
    """Return (statement, its attention) for the attentions that `method` itself computes, in order."""
    return [(i, e.attentions[i]) for i in method.items if isinstance(i, Statement) and i in e.attentions]


def list_cache_kinds(method: Method, e: HFEmitter, stack: Stack | None = None) -> list[str]:
    """Return transformers' kind (such as "full_attention") of each cache of `method`, by cache number; `NO_CACHE` for a
    layer of the `stack` without a cache."""
    numbers = number_caches(method, e, stack)
    kinds = [NO_CACHE] * numbers.count
    for item, first in numbers.first.items():
        if isinstance(item, ModuleCall):
            inner = {first + i: kind for i, kind in enumerate(list_cache_kinds(item.callee, e))}
            kinds = [inner[i] if inner.get(i, NO_CACHE) != NO_CACHE else kind for i, kind in enumerate(kinds)]
        elif isinstance(item, Statement) and item not in e.cross_writes:
            kinds[first] = RECURRENT if item in e.recurrent else _get_cache_kind(item, e)
    return kinds


def list_outer_kinds(top: Method, e: HFEmitter, stack: Stack) -> tuple[list[str], list[str]]:
    """Return (kinds of the caches before the stack, kinds of those after it)."""
    place = next(i for i, item in enumerate(top.items) if isinstance(item, Loop) and item.calls is stack.calls)
    before, after = (replace(top, items=part) for part in (top.items[:place], top.items[place + 1 :]))
    return list_cache_kinds(before, e), list_cache_kinds(after, e)


def list_block_kinds(block: Method, e: HFEmitter) -> list[str]:
    """Return the kinds of the caches of the layer `block`; [`NO_CACHE`] if it has none."""
    return list_cache_kinds(block, e) or [NO_CACHE]


def _get_cache_kind(statement: Statement, e: HFEmitter) -> str:
    """Return the kind of cache of an attention: that of its mask if this is a window or chunk, else full."""
    mask = next((m for m in e.masks.values() if statement.node is not None and statement.node in m.nodes), None)
    return mask.kind if mask is not None and mask.kind in (SLIDING, CHUNKED) else FULL
