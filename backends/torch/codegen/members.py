"""Members of generated classes: the lines of their constructors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..program.statements import ParamRef, Statement, Submodule, relative_to
from .method_writer import write_attribute, write_periodic_list
from .structure import Method, ModuleCall


class Constructor:
    """Writes the lines of ``__init__`` that construct the modules, parameters and buffers of a class."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    # -- to override

    def construct(self, place: str, name: str) -> str:
        """Return the expression that constructs a module of the class `name`; `place` is its path in this class."""
        return f"{name}()"

    def construct_list(self, place: str, names: Sequence[str]) -> str:
        """Return the expression that constructs a ModuleList of the classes `names` in order; `place` is its path."""
        if len({*names}) == 1:
            return f"nn.ModuleList({names[0]}() for _ in range({len(names)}))"
        return f"nn.ModuleList(kind() for kind in {write_periodic_list([*names])})"

    # -- writing

    def write(self, method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
        """Return the lines of ``__init__`` of the class of `method`, with members in order of first use. `inner` maps
        paths of modules to class names; `tables` are paths of weights to construct as ``nn.Embedding``."""
        tree: dict[str, Any] = {}
        entries: dict[str, str | Submodule | ParamRef] = {
            relative_to(p, method.path): name for p, name in inner.items()
        }
        for path, member in method.members.items():
            local = relative_to(path, method.path)
            home = local.removesuffix(".weight")
            if path in tables and isinstance(member, ParamRef) and home not in (local, *entries):
                local = home
                member = Submodule(local, f"nn.Embedding({', '.join(map(str, member.shape))})", ("weight",))
            entries[local] = member
        order = _rank_members(method)
        for path, entry in sorted(entries.items(), key=lambda e: order.get(e[0], len(order))):
            *outer, last = path.split(".")
            node = tree
            for part in outer:
                inner_node = node.setdefault(part, {})
                if not isinstance(inner_node, dict):  # a module that gets another member
                    node[part] = inner_node = {"": inner_node}
                node = inner_node
            if isinstance(node.get(last), dict):
                node[last][""] = entry
            else:
                node[last] = entry
        self._assign_members("self", "", tree)
        return self.lines

    def _assign_members(self, base: str, path: str, tree: dict[str, Any]) -> None:
        """Append the lines that construct the members of the module at `path`, whose source is `base`. `tree` maps each
        name to a class name, a `Submodule`, a `ParamRef`, or a dictionary of inner members."""
        for name, entry in tree.items():
            place, local = write_attribute(base, name), f"{path}.{name}" if path else name
            if isinstance(entry, ParamRef):
                if entry.constant:
                    self.lines.append(f'{base}.register_buffer("{name}", {_write_empty(entry)})')
                else:
                    self.lines.append(f"{place} = {_write_parameter(entry)}")
            elif isinstance(entry, (Submodule, str)):
                self.lines.append(f"{place} = {self._construct_entry(local, entry)}")
            elif all(k.isdigit() for k in entry):
                self._assign_list(place, local, entry)
            else:
                self.lines.append(f"{place} = {self._construct_entry(local, entry.pop('', None))}")
                self._assign_members(place, local, entry)

    def _construct_entry(self, path: str, entry: Any) -> str:
        if isinstance(entry, Submodule):
            return entry.init
        return self.construct(path, entry) if isinstance(entry, str) else "nn.Module()"

    def _assign_list(self, place: str, path: str, entries: dict[str, Any]) -> None:
        """Append lines that construct the list at `path`, whose source is `place`; `entries` maps str indices to
        members."""
        count = max(int(k) for k in entries) + 1
        items = [entries.get(str(i)) for i in range(count)]
        params = [i for i in items if isinstance(i, ParamRef)]
        if len(params) == count:
            self.lines.append(f"{place} = nn.ParameterList([{', '.join(map(_write_parameter, params))}])")
        elif any(isinstance(i, Submodule) for i in items):
            kinds = [self._construct_entry(f"{path}.{n}", i) for n, i in enumerate(items)]
            self.lines.append(f"{place} = nn.ModuleList([{', '.join(kinds)}])")
        else:
            names = [i if isinstance(i, str) else "nn.Module" for i in items]
            self.lines.append(f"{place} = {self.construct_list(path, names)}")
        for i, item in enumerate(items):
            if isinstance(item, dict):
                self._assign_members(f"{place}[{i}]", f"{path}.{i}", item)


def write_constructor(method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
    """Return the lines of ``__init__`` of the class of `method` (see `Constructor.write`), or ``pass`` for none."""
    return Constructor().write(method, inner, tables) or ["pass"]


def _rank_members(method: Method) -> dict[str, int]:
    """Map the relative path of each member to its rank in order of first use."""
    order: dict[str, int] = {}
    for item in method.items:
        members = item.operands if isinstance(item, Statement) else item.calls
        for member in (m for m in members if isinstance(m, (ModuleCall, Submodule, ParamRef))):
            order.setdefault(relative_to(member.path, method.path), len(order))
    return order


def _write_parameter(param: ParamRef) -> str:
    return f"nn.Parameter({_write_empty(param)})"


def _write_empty(param: ParamRef) -> str:
    shape = ", ".join(map(str, param.shape)) or "()"
    return f"torch.empty({shape}{f', dtype={param.dtype}' if param.dtype else ''})"
