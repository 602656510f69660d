"""The plan of pipeline parallelism: embedding, layers, and the modules after them, in stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...codegen.structure import Item, Loop, ModuleCall
from ...program.statements import Operand, Statement, Submodule, Var
from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel

HIDDEN = (["hidden_states"], ["hidden_states"])
PROPERTIES = r"\.(device|dtype|shape)"  # attributes of embeddings that later stages have also


def plan_pipeline(base: BaseModel) -> dict[str, Any] | str:
    """Return module path → (input names, output names) for the modules of pipeline stages, in order of execution.
    Return the reason (str) if only one stage is possible.

    Engines replace the modules of other stages by modules that return their first argument, and pass hidden states
    instead of embeddings to later stages. So all computation between the embedding and the last module must be in
    modules.
    """
    stack, lowered = base.stack, base.lowered
    e = lowered.emitter
    if stack is None:
        return "it has no list of layers, or its layers share weights"
    if not e.embedding:
        return "more than one embedding reads the token ids"
    if any(len(c.results) != 1 for c in stack.calls):
        return "its layers return more than the hidden states"
    items = base.method.items
    place = next(i for i, item in enumerate(items) if isinstance(item, Loop) and item.calls is stack.calls)
    loop = items[place]
    assert isinstance(loop, Loop)
    before = set(_list_modules(items[:place])) - {e.embedding}
    copies: dict[Operand, Operand] = {
        i.results[0]: i.operands[0] for i in items[:place] if isinstance(i, Statement) and i.text == "{0}"
    }
    entering = loop.calls[0].inputs[loop.chained[0]]
    if before or copies.get(entering, entering) is not e.embeds:
        return f"{', '.join(sorted(before)) or 'more than the embedding'} computes the input of its layers"
    operands = [v for c in loop.calls for i, v in enumerate(c.inputs) if i != loop.chained[0]]
    if not _find_dependent_values(e.embeds, items[:place], lowered).isdisjoint(operands):
        return "its layers also read the embeddings"
    after = _follow_chain(loop.results[0], items[place + 1 :])
    if after is None or (lowered.head is not None and after[1] is not lowered.hidden):
        return "more than modules follows its layers"
    return {
        e.embedding: (["input_ids"], ["inputs_embeds"]),
        stack.path: (["hidden_states", "attention_mask"], ["hidden_states"]),
        **dict.fromkeys(after[0], HIDDEN),
    }


def _find_dependent_values(embeds: Var, items: Sequence[Item], lowered: LoweredModel) -> set[Operand]:
    """Return `embeds` and the results of `items` that depend on its elements; reads of shape, dtype or device do not
    count. Masks are left out, because every stage computes them."""
    masks = [mask.statement for mask in lowered.emitter.masks.values()]
    dependent: set[Operand] = {embeds}
    for item in items:
        read = item.operands if isinstance(item, Statement) else [v for c in _list_calls(item) for v in c.inputs]
        text = item.text if isinstance(item, Statement) else ""
        places = (i for i, v in enumerate(read) if v in dependent)
        if item not in masks and any(re.search(rf"\{{{i}\}}(?!{PROPERTIES})", text) or not text for i in places):
            dependent.update(item.results)
    return dependent


def _list_calls(item: Item) -> list[ModuleCall]:
    return [item] if isinstance(item, ModuleCall) else item.calls if isinstance(item, Loop) else []


def _follow_chain(value: Operand, items: Sequence[Item]) -> tuple[list[str], Operand] | None:
    """Return the paths of the modules that `items` apply to `value` one after the other, and the final result. None if
    an item is not the call of one module on the previous result alone."""
    paths = []
    for item in items:
        if isinstance(item, Loop) or not item.results:
            return None
        modules = [*_list_modules([item])]
        read = [o for o in item.operands if isinstance(o, Var)] if isinstance(item, Statement) else item.inputs
        plain = not isinstance(item, Statement) or re.fullmatch(r"\{\d+\}\(\{\d+\}\)", item.text)
        if len(modules) != 1 or not plain or [*read] != [value]:
            return None
        paths += modules
        value = item.results[0]
    return paths, value


def _list_modules(items: Sequence[Item]) -> Iterator[str]:
    """Yield the paths of the modules that `items` call, in order; paths may repeat."""
    for item in items:
        if isinstance(item, Statement):
            yield from (o.path for o in item.operands if isinstance(o, Submodule))
        else:
            yield from (c.path for c in _list_calls(item))
