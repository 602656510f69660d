"""Convert the names of a graph to identifiers of Python and attributes of `nn.Module`, for all generated code.

Names of graphs come from checkpoints, architecture files and IR files. Valid attributes stay as they are; `class`
becomes `class_`, `a-b` becomes `a_b`, and attributes of `nn.Module` itself (`forward`, `training`, `type`) also get an
underscore. Siblings keep distinct names.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from weft.ir.graph import Graph
from weft.passes.edits.edit import rename_all

from ..program.snippets import RESERVED, read_library

MAX_SPARSE_LIST = 1000  # longest list of modules with gaps, which are filled with empty modules
MODULE_ATTRIBUTES = {*dir(nn.Module()), "new_cache", "cache"}  # attributes of every generated module


def rename_for_python(graph: Graph, avoid: Collection[str] = (), usual: Mapping[str, str] | None = None) -> list[str]:
    """Rename scopes, values, parameters, inputs and outputs of `graph` to valid identifiers; return the changed old
    names. Parts of names that are in `avoid` get an underscore. `usual` maps top-level modules to new names; it applies
    to modules with only a weight and perhaps a bias, if the new name is free."""
    paths, inputs = _map_paths(graph, avoid), map_argument_names(graph)
    for old, new in _select_plain_modules(graph, usual or {}).items():
        paths |= {k: new + v[len(old) :] for k, v in paths.items() if v == old or v.startswith(f"{old}.")}
    outputs = _make_distinct([*graph.outputs])
    changed = {old: None for names in (paths, inputs, outputs) for old, new in names.items() if old != new}
    if changed:
        rename_all(graph, paths, paths, inputs, outputs)
    return list(changed)


def _select_plain_modules(graph: Graph, usual: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `usual` with a free new name, whose module has only a weight, perhaps a bias."""
    values = (v.name for n in graph.nodes for v in n.outputs)
    used = {name.partition(".")[0] for name in (*graph.params, *(n.scope for n in graph.nodes), *values)}

    def is_plain(module: str) -> bool:
        params = {p for p in graph.params if p.startswith(f"{module}.")}
        return f"{module}.weight" in params and params <= {f"{module}.weight", f"{module}.bias"}

    return {old: new for old, new in usual.items() if new not in used and is_plain(old)}


def map_argument_names(graph: Graph) -> dict[str, str]:
    """Map the inputs of `graph` to argument names: `past.0.key` becomes `past_0_key`."""
    return _make_distinct([*graph.inputs], avoid={*RESERVED, *read_library(), "last"})


def map_parameter_names(graph: Graph) -> dict[str, str]:
    """Map the names of parameters in generated code to their names in `graph`."""
    paths = _map_paths(graph)
    return {paths[name]: name for name in graph.params}


def _map_paths(graph: Graph, avoid: Collection[str] = ()) -> dict[str, str]:
    """Map dotted names to distinct ones of attributes of modules, not in `avoid`, or indices of a ModuleList."""
    values = (v.name for node in graph.nodes for v in node.outputs)
    names = [*graph.params, *(node.scope for node in graph.nodes), *values, *(v.name for v in graph.inputs.values())]
    tree: dict[str, dict[str, None]] = {}  # the parts below a path, in order of appearance
    for name in names:
        for path, part in _split_path(name):
            tree.setdefault(path, {})[part] = None
    below = {path: _map_siblings(parts, bool(path), avoid) for path, parts in tree.items()}
    renamed = {name: ".".join(below[path][part] for path, part in _split_path(name)) for name in names if name}
    for name in graph.params:
        if f"{name}." in tree:  # a tensor has no children
            new_names = {new for old, new in renamed.items() if old != name}
            renamed[name] += "_"
            while renamed[name] in new_names:
                renamed[name] += "_"
    return renamed


def _split_path(name: str) -> Iterator[tuple[str, str]]:
    """Yield each part of the dotted `name`, as pairs (what precedes it, with a dot at the end; part)."""
    path = ""
    for part in name.split("."):
        yield path, part
        path += f"{part}."


def _map_siblings(parts: Iterable[str], listed: bool, avoid: Collection[str] = ()) -> dict[str, str]:
    """Map the names of siblings to different identifiers, and "" to "_". If they may form a ModuleList (`listed`), and
    are indices without large gaps, map them to themselves."""
    parts = [part for part in parts if part]
    numbered = listed and all(re.fullmatch(r"0|[1-9]\d{0,8}", part) for part in parts)
    if numbered and max(map(int, parts), default=0) < MAX_SPARSE_LIST + 4 * len(parts):
        return {part: part for part in parts}
    return {"": "_", **_make_distinct(parts, {*MODULE_ATTRIBUTES, *avoid})}


def _make_distinct(names: list[str], avoid: Collection[str] = MODULE_ATTRIBUTES) -> dict[str, str]:
    """Map `names` to distinct identifiers, none of them in `avoid`."""
    used = {name for name in names if _make_identifier(name, avoid) == name}
    renamed = {}
    for name in names:
        base = _make_identifier(name, avoid)
        numbered = itertools.chain([base], (f"{base}_{n}" for n in itertools.count(2)))
        renamed[name] = next(new for new in numbered if new == name or new not in used)
        used.add(renamed[name])
    return renamed


def _make_identifier(name: str, avoid: Collection[str]) -> str:
    new = re.sub(r"[^A-Za-z0-9_]", "_", name)
    new = re.sub(r"^__+", "_", new)  # two underscores would be mangled in a class
    if not new or new[0].isdigit() or not new.strip("_"):
        new = f"v_{new}".rstrip("_")
    return f"{new}_" if keyword.iskeyword(new) or new in avoid else new
