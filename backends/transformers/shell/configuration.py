"""The text of configuration_*.py, and config.json: every number of an architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...torch.codegen.source import formatted
from ...torch.codegen.structure import Call, Loop, Method
from ...torch.program.statements import Statement
from ..lower.emitter import CHUNKED, FULL, RECURRENT, SLIDING, ShellEmitter
from ..lower.lower import Lowered
from .modeling import Modeling, template
from .stack import Stack, cache_items, keeps

NO_CACHE = "moe"  # what transformers calls a layer without a cache
TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


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
    """The class of the config of the model called `name`, whose file ends in `stem`; `more` are facts beside the numbers
    of the architecture."""
    fields: dict[str, Any] = dict(lowered.fields.values)
    layers, lines = _layers(lowered, modeling)
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
        tables=_tables(lowered, modeling),
        lines=lines,
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


def _layers(lowered: Lowered, modeling: Modeling) -> tuple[dict[str, Any], list[str]]:
    """The fields that tell of layers, and the lines that fill them in for another number of layers."""
    stack, e = modeling.stack, lowered.emitter
    kinds = cache_kinds(modeling.base, e, stack)
    if stack is None:
        fields: dict[str, Any] = {"num_hidden_layers": max(1, len(kinds))}
        if _told(kinds, lowered):
            fields["layer_types"] = kinds
        return fields, []
    count = len(stack)
    fields = (
        {"num_hidden_layers": count}
        if modeling.count_field == "num_hidden_layers"
        else {
            "num_blocks": count,
            "num_hidden_layers": len(kinds),
        }
    )
    lines = []
    various = len(set(modeling.blocks)) > 1
    if various:
        fields["block_types"] = modeling.blocks
        lines += [
            "kinds = self.block_types or PATTERN",
            f"self.block_types = [kinds[i % len(kinds)] for i in range(self.{modeling.count_field})]",
        ]
    if modeling.count_field == "num_blocks":
        each = "sum(len(CACHES[kind]) for kind in self.block_types)" if various else f"{stack.caches} * self.num_blocks"
        lines.append(f"self.num_hidden_layers = {each}")
    if _told(kinds, lowered):
        fields["layer_types"] = kinds
        if various:
            lines.append("self.layer_types = [cache for kind in self.block_types for cache in CACHES[kind]]")
        else:
            lines.append(
                f"self.layer_types = {_one_list(kinds[: max(1, stack.caches or 1)])} * self.{modeling.count_field}"
            )
    return fields, lines


def _one_list(kinds: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{k}"' for k in kinds) + "]"


def _told(kinds: Sequence[str], lowered: Lowered) -> bool:
    """Return whether a config must say the kinds of its caches: transformers would guess others."""
    windows = {"sliding_window", "attention_chunk_size"} & lowered.fields.values.keys()
    guessed = SLIDING if "sliding_window" in windows else CHUNKED if windows else FULL
    return bool(kinds) and set(kinds) != {guessed}


def _tables(lowered: Lowered, modeling: Modeling) -> list[str]:
    """Tables of the blocks by their names, where there are several."""
    if len(set(modeling.blocks)) < 2 or modeling.stack is None:
        return []
    lines = [f"PATTERN = {_one_list(_period(modeling.blocks))}  # of the layers"]
    kinds = {
        name: block_kinds(c.callee, lowered.emitter)
        for name, c in zip(modeling.blocks, modeling.stack.calls, strict=True)
    }
    if (
        _told(cache_kinds(modeling.base, lowered.emitter, modeling.stack), lowered)
        or modeling.count_field == "num_blocks"
    ):
        entries = ", ".join(f'"{name}": {_one_list(found)}' for name, found in kinds.items())
        lines.append(f"CACHES = {{{entries}}}  # of each block, as transformers calls them")
    return lines


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
    """How many states the recurrences of a layer keep, at most."""
    scopes = lowered.emitter.states.values()
    return max((sum(n for _, n in known.values()) for known in scopes), default=0)
