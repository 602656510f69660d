"""The text form of a graph. Readable, complete: ``parse(print_graph(g))`` equals g.

::

    graph smollm2 {
      meta kind = "decoder"
      input %input_ids: i64[batch, seq]
      param %embed.weight: f32[49152, 576] = source("token_embd.weight")
      scope layers.0.attn
        %.q: f32[batch, seq, 576] = linear(%layers.0.norm, %.q.weight)
      output logits = %lm_head
    }

A leading dot stands for the current scope. Attributes that equal their default are left out; absent operands are ``_``.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

from ..graph import Graph, Node, Value
from ..recipes.recipe import Recipe
from ..types.dtypes import DType
from ..types.sizes import Poly


def print_graph(graph: Graph) -> str:
    """The text form, ending in a newline."""
    lines = [f"graph {graph.name} {{"]
    lines += [f"  meta {k} = {json.dumps(v)}" for k, v in graph.meta.items()]
    for name, v in graph.inputs.items():
        alias = "" if name == v.name else f" as {name}"
        lines.append(f"  input %{v.name}: {v.type}{alias}")
    lines += [f"  param %{p.name}: {p.type} = {format_recipe(p.recipe)}" for p in graph.params.values()]
    scope = ""
    for node in graph.nodes:
        if node.scope != scope:
            scope = node.scope
            lines.append(f"  scope {scope or '_'}")
        lines.append(("    " if scope else "  ") + format_node(node))
    lines += [f"  output {name} = %{v.name}" for name, v in graph.outputs.items()]
    return "\n".join([*lines, "}"]) + "\n"


def format_node(node: Node) -> str:
    """One line: outputs with types, op, operands, attributes."""

    def ref(v: Value | None) -> str:
        if v is None:
            return "_"
        local = node.scope and v.name.startswith(node.scope + ".")
        return f"%{v.name[len(node.scope) :]}" if local else f"%{v.name}"

    outs = ", ".join(f"{ref(v)}: {v.type}" for v in node.outputs)
    args = [ref(v) for v in node.inputs]
    args += [f"{k}={format_attr(v)}" for k, v in node.attrs.items() if node.op.attrs[k].default != v]
    return f"{outs} = {node.op.name}({', '.join(args)})"


def format_attr(value: Any) -> str:
    """An attribute value as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(format_attr, value))}]"
    if isinstance(value, (int, float, Poly)):
        return str(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Recipe):
        return format_recipe(value)
    raise TypeError(f"{value!r} has no text form")


def format_recipe(recipe: Recipe) -> str:
    """A recipe as a call: the first field by position, others by name unless they equal their default."""
    args = []
    for i, f in enumerate(fields(recipe)):
        value = getattr(recipe, f.name)
        if f.default is not MISSING and f.default == value:
            continue
        text = format_attr(value)
        args.append(text if i == 0 else f"{f.name}={text}")
    return f"{recipe.name}({', '.join(args)})"
