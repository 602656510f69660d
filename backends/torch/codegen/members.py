"""Members of generated classes: the lines of their constructors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..program.statements import ParamRef, Submodule, relative
from .method_writer import attribute, periodic
from .structure import Call, Loop, Method, reads


class Constructor:
    """Writes the lines that make what the class of a method holds."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    # -- what kinds of classes differ in

    def made(self, place: str, name: str) -> str:
        """The text that makes the module of class `name` at a `place` below the method."""
        return f"{name}()"

    def listed(self, place: str, names: Sequence[str]) -> str:
        """The text that makes a list of modules of these classes."""
        if len({*names}) == 1:
            return f"nn.ModuleList({names[0]}() for _ in range({len(names)}))"
        return f"nn.ModuleList(kind() for kind in {periodic([*names])})"

    # -- writing

    def write(self, method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
        """The lines; `inner` are the classes of the method's modules by path, `tables` the paths of weights that
        embed."""
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
        self._hold("self", "", tree)
        return self.lines

    def _hold(self, base: str, path: str, tree: dict[str, Any]) -> None:
        """Append the lines that make what `tree` says of the module `base`: classes, modules and tensors by name."""
        for name, entry in tree.items():
            place, local = attribute(base, name), f"{path}.{name}" if path else name
            if isinstance(entry, ParamRef):
                if entry.constant:
                    self.lines.append(f'{base}.register_buffer("{name}", {_empty(entry)})')
                else:
                    self.lines.append(f"{place} = {_parameter(entry)}")
            elif isinstance(entry, Submodule):
                self.lines.append(f"{place} = {entry.init}")
            elif isinstance(entry, str):
                self.lines.append(f"{place} = {self.made(local, entry)}")
            elif all(k.isdigit() for k in entry):
                self._hold_list(place, local, entry)
            else:
                kind = entry.pop("", None)
                made = "nn.Module()" if kind is None else self._one(local, kind)
                self.lines.append(f"{place} = {made}")
                self._hold(place, local, entry)

    def _one(self, path: str, entry: Any) -> str:
        """The text that makes one module; an empty one for what only has parts."""
        if isinstance(entry, Submodule):
            return entry.init
        return self.made(path, entry) if isinstance(entry, str) else "nn.Module()"

    def _hold_list(self, place: str, path: str, entries: dict[str, Any]) -> None:
        """The same of the list `place`, whose `entries` are numbered."""
        count = max(int(k) for k in entries) + 1
        items = [entries.get(str(i)) for i in range(count)]
        params = [i for i in items if isinstance(i, ParamRef)]
        if len(params) == count:
            self.lines.append(f"{place} = nn.ParameterList([{', '.join(map(_parameter, params))}])")
        elif any(isinstance(i, Submodule) for i in items):
            kinds = [self._one(f"{path}.{n}", i) for n, i in enumerate(items)]
            self.lines.append(f"{place} = nn.ModuleList([{', '.join(kinds)}])")
        else:
            self.lines.append(
                f"{place} = {self.listed(path, [i if isinstance(i, str) else 'nn.Module' for i in items])}"
            )
        for i, item in enumerate(items):
            if isinstance(item, dict):
                self._hold(f"{place}[{i}]", f"{path}.{i}", item)


def constructor(method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
    """The lines that make what the class of `method` holds; see `Constructor.write`."""
    return Constructor().write(method, inner, tables) or ["pass"]


def _order(method: Method) -> dict[str, int]:
    """Map members to the order of their first use."""
    order: dict[str, int] = {}
    for item in method.items:
        calls = item.calls if isinstance(item, Loop) else [item] if isinstance(item, Call) else []
        paths = [c.path for c in calls] or [o.path for o in reads(item) if isinstance(o, (Submodule, ParamRef))]
        for p in paths:
            order.setdefault(relative(p, method.path), len(order))
    return order


def _parameter(param: ParamRef) -> str:
    return f"nn.Parameter({_empty(param)})"


def _empty(param: ParamRef) -> str:
    shape = ", ".join(map(str, param.shape)) or "()"
    return f"torch.empty({shape}{f', dtype={param.dtype}' if param.dtype else ''})"
