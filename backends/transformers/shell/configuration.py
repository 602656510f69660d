"""The text of configuration_*.py, and config.json: every number of an architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...torch.codegen.source import formatted
from ...torch.codegen.structure import Call, Loop, Method
from ...torch.program.statements import Statement
from ..lower.emitter import CHUNKED, FULL, RECURRENT, SLIDING, ShellEmitter
from ..lower.lower import Lowered
from .modeling import Modeling, template
from .stack import Stack, cache_items, keeps

CACHES_DOC = "The kind of the cache of each layer, as transformers calls it."
COUNTING = "hybrid"  # a layer with states and keys
NO_CACHE = "moe"  # what transformers calls a layer without a cache
TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Property(NamedTuple):
    """A property of a config: its name, type, docstring and lines."""

    name: str
    type: str
    doc: str
    lines: list[str]


@dataclass
class Configuration:
    """A config: the `text` of its class, and what config.json says, both with all `fields`."""

    text: str
    fields: dict[str, Any]
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_configuration(
    lowered: Lowered,
    modeling: Modeling,
    name: str,
    stem: str,
    plans: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, Any],
) -> Configuration:
    """The class of the config of the model called `name`, whose file ends in `stem`; `more` are facts beside the
    numbers of the architecture."""
    fields: dict[str, Any] = dict(lowered.fields.values)
    layers, tables, properties = _layers(lowered, modeling)
    order = ("vocab_size", "hidden_size")
    numbers = {k: fields.pop(k) for k in order if k in fields} | layers | fields | dict(more)
    shown = {k: (_annotation(v), repr(v).replace("'", '"')) for k, v in numbers.items() if not isinstance(v, list)}
    shown |= {k: ("list[str] | None", "None") for k, v in numbers.items() if isinstance(v, list)}
    text = template("configuration.py.j2").render(
        title=lowered.graph.name,
        config=f"{name}Config",
        doc=f"The numbers of {name}Model; a smaller one has other numbers.",
        model_type=stem,
        plans={k: {key: _plan(value) for key, value in plan.items()} for k, plan in plans.items()},
        fields=shown,
        tables=tables,
        properties=properties,
    )
    return Configuration(formatted(text), numbers, {k: dict(v) for k, v in plans.items()})


def _plan(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("'", '"')


def _annotation(value: Any) -> str:
    if value is None:
        return "int | None"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    return "float" if isinstance(value, float) else "Any"


def _layers(lowered: Lowered, modeling: Modeling) -> tuple[dict[str, Any], list[str], list[Property]]:
    """The fields that tell of layers, the tables of blocks by their names, where there are several, and what follows
    from the number of layers."""
    stack, e, count = modeling.stack, lowered.emitter, modeling.count_field
    kinds = cache_kinds(modeling.base, e, stack)
    told = bool(kinds) and set(kinds) != {FULL}  # SGLang takes a config without layer_types as one without windows
    counting = kinds.index(RECURRENT) if e.cached and not e.counts else None
    if stack is None:
        shown = [COUNTING if i == counting else kind for i, kind in enumerate(kinds)]
        properties = [Property("layer_types", "list[str]", CACHES_DOC, [f"return {_strings(shown)}"])] if told else []
        return {"num_hidden_layers": max(1, len(kinds))}, [], properties
    fields: dict[str, Any] = {count: len(stack)}
    inside = {n: block_kinds(c.callee, e) for n, c in zip(modeling.blocks, stack.calls, strict=True)}
    tables, properties = [], []
    each = f"{_strings(next(iter(inside.values())))} * self.{count}"
    if various := len(inside) > 1:
        fields["block_types"] = modeling.blocks
        tables.append(f"PATTERN = {_strings(_period(modeling.blocks))}  # of the layers")
        lines = ["kinds = self.block_types or PATTERN", f"return [kinds[i % len(kinds)] for i in range(self.{count})]"]
        properties.append(
            Property(
                "blocks", "list[str]", "The class of each layer: `block_types`, or PATTERN, again and again.", lines
            )
        )
        each = "[cache for kind in self.blocks for cache in CACHES[kind]]"
    if told or count == "num_blocks":
        if various:
            entries = ", ".join(f'"{name}": {_strings(found)}' for name, found in inside.items())
            tables.append(f"CACHES = {{{entries}}}  # of each block, as transformers calls them")
        parts = [_strings(part) if part else "" for part in around(modeling.base, e, stack)]
        whole = " + ".join(filter(None, (parts[0], each, parts[1])))
        lines = [f"return {whole}"]
        if counting is not None:
            mark = f'"{COUNTING}" if i == {counting} else kind'
            lines = [
                f"kinds = {whole}",
                f"return [{mark} for i, kind in enumerate(kinds)]  # the first counts tokens, too",
            ]
        properties.append(Property("layer_types", "list[str]", CACHES_DOC, lines))
    if count == "num_blocks":
        properties.append(
            Property("num_hidden_layers", "int", "The number of caches.", ["return len(self.layer_types)"])
        )
    return fields, tables, properties


def _strings(kinds: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{k}"' for k in kinds) + "]"


def _period(names: Sequence[str]) -> list[str]:
    """The shortest run of `names` that, repeated, makes them."""
    for size in range(1, len(names) + 1):
        if all(names[i] == names[i % size] for i in range(len(names))):
            return [*names[:size]]
    return [*names]


def cache_kinds(top: Method, e: ShellEmitter, stack: Stack | None) -> list[str]:
    """The kind of each cache of a model, in the order of its layers; that of a layer of the stack without one too."""
    found: list[str] = []
    for item in top.items:
        if isinstance(item, Loop):
            listed = stack is not None and item.calls is stack.calls
            for call in item.calls:
                found += block_kinds(call.callee, e) if listed else _kinds(call.callee, e)
        elif isinstance(item, Call):
            found += _kinds(item.callee, e)
        elif keeps(item):
            found.append(RECURRENT if item in e.recurrent else _kind(item, e))
    return found


def around(top: Method, e: ShellEmitter, stack: Stack) -> tuple[list[str], list[str]]:
    """The kinds of the caches before and behind those of the stack."""
    place = next(i for i, item in enumerate(top.items) if isinstance(item, Loop) and item.calls is stack.calls)
    before, after = (replace(top, items=part) for part in (top.items[:place], top.items[place + 1 :]))
    return cache_kinds(before, e, None), cache_kinds(after, e, None)


def block_kinds(block: Method, e: ShellEmitter) -> list[str]:
    """The kinds of the caches of one block; of one without any, what stands for none."""
    return _kinds(block, e) or [NO_CACHE]


def _kinds(method: Method, e: ShellEmitter) -> list[str]:
    """The kinds of the caches of a method, in their order."""
    kinds: list[str] = []
    for item, count in cache_items(method, e):
        if isinstance(item, Call):
            kinds += _kinds(item.callee, e)
        elif count and isinstance(item, Statement):
            kinds.append(RECURRENT if item in e.recurrent else _kind(item, e))
    return kinds


def _kind(statement: Statement, e: ShellEmitter) -> str:
    """The kind of the cache of an attention."""
    mask = next((m for m in e.masks.values() if statement.node is not None and statement.node in m.nodes), None)
    return mask.kind if mask is not None and mask.kind in (SLIDING, CHUNKED) else FULL


def states_each(lowered: Lowered) -> int:
    """Return the largest number of states that the recurrences of a layer keep."""
    scopes = lowered.emitter.states.values()
    return max((sum(n for _, n in known.values()) for known in scopes), default=0)
