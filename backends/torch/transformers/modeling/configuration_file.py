"""The source of configuration_*.py, and the fields of config.json: all sizes of an architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...codegen.model_source import format_source, load_template
from ..lower.lower_base_and_head import LoweredModel
from ..lower.model_emitter import RECURRENT
from .base import BaseModel
from .modeling_file import ModelingFile
from .stack import Stack, list_block_kinds, list_outer_kinds

CACHES_DOC = "The kind of the cache of each layer, as transformers calls it."
HYBRID = "hybrid"  # transformers' kind of a cache with states and keys
TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Property(NamedTuple):
    """A property of a config class: `type` is its annotation, `lines` the source of its getter."""

    name: str
    type: str
    doc: str
    lines: list[str]


@dataclass
class Configuration:
    """A config: source of its class, and `fields` of config.json."""

    text: str
    fields: dict[str, Any]


def write_configuration(
    modeling: ModelingFile, name: str, stem: str, plans: Mapping[str, Mapping[str, Any]], more: Mapping[str, Any]
) -> Configuration:
    """Return the config of a model whose class names begin with `name`; `stem` is its model_type. plans: plans of
    parallelism by config field. more: fields in addition to the sizes of the architecture."""
    lowered = modeling.bases[0].lowered
    fields: dict[str, Any] = dict(lowered.fields.values)
    layers, tables, properties = dict[str, Any](), list[str](), list[Property]()
    for base in modeling.bases:
        side_layers, side_tables, side_properties = _describe_layers(base)
        layers, tables, properties = layers | side_layers, tables + side_tables, properties + side_properties
    order = ("vocab_size", "hidden_size")
    values = {k: fields.pop(k) for k in order if k in fields} | layers | fields | dict(more)
    kinds = {type(None): "int | None", bool: "bool", int: "int", float: "float"}
    defaults = {k: (kinds.get(type(v), "Any"), _write_literal(v)) for k, v in values.items() if not isinstance(v, list)}
    defaults |= {k: ("list[str] | None", "None") for k, v in values.items() if isinstance(v, list)}
    text = load_template("configuration.py.j2", Path(__file__).parent).render(
        title=lowered.full_graph.name,
        config=f"{name}Config",
        doc=f"The sizes of {name}Model; other values make a model of another size.",
        model_type=stem,
        plans={k: {key: _write_literal(value) for key, value in plan.items()} for k, plan in plans.items()},
        fields=defaults,
        tables=tables,
        properties=properties,
    )
    return Configuration(format_source(text), values)


def _write_literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _describe_layers(base: BaseModel) -> tuple[dict[str, Any], list[str], list[Property]]:
    """Return (config fields of the layers, lines of module-level tables, properties that depend on their number)."""
    stack, count = base.stack, base.count_field
    if stack is None:
        kinds = [HYBRID if i == _find_counting_cache(base) else kind for i, kind in enumerate(base.kinds)]
        fixed = Property("layer_types", "list[str]", CACHES_DOC, [f"return {_write_list(kinds)}"])
        return {count: max(1, len(base.kinds))}, [], [fixed] * base.needs_kinds
    fields: dict[str, Any] = {count: len(stack)}
    tables, properties = [], []
    if len({*base.blocks}) > 1:
        fields[base.block_types] = base.blocks
        pattern = f"{'ENCODER_' * base.is_second}PATTERN"
        tables.append(f"{pattern} = {_write_list(_find_period(base.blocks))}  # of the layers")
        lines = [f"kinds = self.{base.block_types} or {pattern}"]
        lines.append(f"return [kinds[i % len(kinds)] for i in range(self.{count})]")
        doc = f"The class of each layer: `{base.block_types}`, or {pattern} by default, repeated."
        properties.append(Property(base.writer.kinds, "list[str]", doc, lines))
    if base.needs_kinds:
        each, table_lines = _write_layer_kinds(base, stack)
        tables += table_lines
        properties.append(Property("layer_types", "list[str]", CACHES_DOC, _write_layer_types(base, stack, each)))
    if count == "num_blocks":
        counting = ["return len(self.layer_types)"]
        properties.append(Property("num_hidden_layers", "int", "The number of caches.", counting))
    return fields, tables, properties


def _find_counting_cache(base: BaseModel) -> int | None:
    """Return the index of the recurrent cache that must count tokens; None without caches, or if a KV cache counts."""
    e = base.lowered.emitter
    return base.kinds.index(RECURRENT) if e.cached and not e.has_counting_cache else None


def _write_layer_kinds(base: BaseModel, stack: Stack) -> tuple[str, list[str]]:
    """Return the source of the list of all layers' cache kinds, and the lines of the table that the source reads."""
    e = base.lowered.emitter
    inside = {n: list_block_kinds(c.callee, e) for n, c in zip(base.blocks, stack.calls, strict=True)}
    if len(inside) == 1:
        return f"{_write_list(next(iter(inside.values())))} * self.{base.count_field}", []
    entries = ", ".join(f'"{name}": {_write_list(kinds)}' for name, kinds in inside.items())
    table = f"CACHES = {{{entries}}}  # of each block, as transformers calls them"
    return f"[cache for kind in self.{base.writer.kinds} for cache in CACHES[kind]]", [table]


def _write_layer_types(base: BaseModel, stack: Stack, each: str) -> list[str]:
    """Return the lines of the property layer_types; `each` is the source of the list of the layers' cache kinds."""
    parts = [_write_list(part) if part else "" for part in list_outer_kinds(base.method, base.lowered.emitter, stack)]
    kinds = " + ".join(filter(None, (parts[0], each, parts[1])))
    if (counting := _find_counting_cache(base)) is None:
        return [f"return {kinds}"]
    mark = f'"{HYBRID}" if i == {counting} else kind'
    return [f"kinds = {kinds}", f"return [{mark} for i, kind in enumerate(kinds)]  # the first also counts tokens"]


def _write_list(kinds: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{k}"' for k in kinds) + "]"


def _find_period(names: Sequence[str]) -> list[str]:
    """Return the shortest prefix of `names` which, repeated, begins with all of `names`."""
    for size in range(1, len(names) + 1):
        if all(names[i] == names[i % size] for i in range(len(names))):
            return [*names[:size]]
    return [*names]


def count_layer_states(lowered: LoweredModel) -> int:
    """Return the largest number of recurrent states in one layer; 0 without recurrences."""
    scopes = lowered.emitter.states.values()
    return max((sum(n for _, n in states.values()) for states in scopes), default=0)
