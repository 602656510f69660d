"""Members of generated classes: the lines of their constructors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..program.statements import ParamRef, Submodule, relative
from .method_writer import attribute, periodic
from .structure import Call, Loop, Method, reads


def constructor(method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
    """The lines that make what the class of `method` holds; `inner` are the classes of its modules by path, `tables`
    the paths of weights that embed."""
    tree: dict[str, Any] = {}
    entries: dict[str, str | Submodule | ParamRef] = {relative(p, method.path): name for p, name in inner.items()}
    for path, member in method.holds.items():
        local = relative(path, method.path)
        home = local.removesuffix(".weight")
        if path in tables and isinstance(member, ParamRef) and home not in (local, *entries):
            local = home
            member = Submodule(local, f"nn.Embedding({', '.join(map(str, member.shape))})", ("weight",))
        entries[local] = member
    order = _order(method)
    for path, entry in sorted(entries.items(), key=lambda e: order.get(e[0], len(order))):
        *outer, last = path.split(".")
        node = tree
        for part in outer:
            inner_node = node.setdefault(part, {})
            if not isinstance(inner_node, dict):  # a module that is given something more
                node[part] = inner_node = {"": inner_node}
            node = inner_node
        if isinstance(node.get(last), dict):
            node[last][""] = entry
        else:
            node[last] = entry
    lines: list[str] = []
    _hold(lines, "self", tree)
    return lines or ["pass"]


def _order(method: Method) -> dict[str, int]:
    """Map members to the order of their first use."""
    order: dict[str, int] = {}
    for item in method.items:
        calls = item.calls if isinstance(item, Loop) else [item] if isinstance(item, Call) else []
        paths = [c.path for c in calls] or [o.path for o in reads(item) if isinstance(o, (Submodule, ParamRef))]
        for p in paths:
            order.setdefault(relative(p, method.path), len(order))
    return order


def _hold(lines: list[str], base: str, tree: dict[str, Any]) -> None:
    """Append the lines that make what `tree` says of the module `base`: classes, modules and tensors by name."""
    for name, entry in tree.items():
        place = attribute(base, name)
        if isinstance(entry, ParamRef):
            if entry.constant:
                lines.append(f'{base}.register_buffer("{name}", {_empty(entry)})')
            else:
                lines.append(f"{place} = {_parameter(entry)}")
        elif isinstance(entry, Submodule):
            lines.append(f"{place} = {entry.init}")
        elif isinstance(entry, str):
            lines.append(f"{place} = {entry}()")
        elif all(k.isdigit() for k in entry):
            _hold_list(lines, place, entry)
        else:
            kind = entry.pop("", "nn.Module")
            lines.append(f"{place} = {kind.init if isinstance(kind, Submodule) else f'{kind}()'}")
            _hold(lines, place, entry)


def _hold_list(lines: list[str], place: str, entries: dict[str, Any]) -> None:
    """The same of the list `place`, whose `entries` are numbered."""
    count = max(int(k) for k in entries) + 1
    items = [entries.get(str(i)) for i in range(count)]
    kinds = [i if isinstance(i, str) else i.init if isinstance(i, Submodule) else "nn.Module" for i in items]
    params = [i for i in items if isinstance(i, ParamRef)]
    if len(params) == count:
        lines.append(f"{place} = nn.ParameterList([{', '.join(map(_parameter, params))}])")
    elif any(isinstance(i, Submodule) for i in items):
        lines.append(f"{place} = nn.ModuleList([{', '.join(k if '(' in k else k + '()' for k in kinds)}])")
    elif len({*kinds}) == 1:
        lines.append(f"{place} = nn.ModuleList({kinds[0]}() for _ in range({count}))")
    else:
        lines.append(f"{place} = nn.ModuleList(kind() for kind in {periodic(kinds)})")
    for i, item in enumerate(items):
        if isinstance(item, dict):
            _hold(lines, f"{place}[{i}]", item)


def _parameter(param: ParamRef) -> str:
    return f"nn.Parameter({_empty(param)})"


def _empty(param: ParamRef) -> str:
    shape = ", ".join(map(str, param.shape)) or "()"
    return f"torch.empty({shape}{f', dtype={param.dtype}' if param.dtype else ''})"
