"""Count the folders, files and lines of the code, and find its imports. `python -m tests.house` writes docs/house.md.

A room is a folder; its loose files are the files directly in it, without `__init__.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import networkx as nx

from .walk import FLOORS, ORDER, TARGETS, Walk, compiled

MACHINERY, CATALOGUE, LONGEST = 12, 24, 500  # loose files in a room, lines in a file
CATALOGUES = {  # rooms of things of one kind
    "ir/ops": "an op family",
    "passes/library/cleanup": "a pass",
    "passes/library/cache": "a pass",
    "passes/library/fold": "a pass",
    "passes/library/fuse": "a pass",
    "passes/library/decode": "a pass",
    "passes/library/heads": "a pass",
    "passes/library/attention": "a pass",
    "passes/library/positions": "a pass",
    "passes/library/layers": "a pass",
    "passes/library/quantize": "a pass",
    "passes/library/target": "a pass",
    "backends/onnx/lowerings": "lowerings of an op family",
    "backends/torch/ops": "lowerings of an op family",
    "backends/torch/lib": "functions that generated models contain",
    "backends/torch/kernels": "a Triton kernel",
    "backends/torch/kernels/shared": "device functions",
    "frontends/dsl": "modules of the DSL",
    "frontends/models/families": "a group of families",
    "frontends/app/cli": "a command",
}
# (addition, what an extension defines for it, the test that adds one from another package)
PLACES = (
    ("an op", "a function, with its types, body and cases", "test_plugin_adds_an_op"),
    ("a model family", "a table", "test_plugin_adds_a_family"),
    ("a pass", "a class", "test_plugin_adds_a_pass"),
    (
        "a block layout, of integers or floats",
        "a `BlockLayout`, if a checkpoint reader returns such blocks; kernels depend only on bits and group size",
        "test_plugin_adds_a_block_layout",
    ),
    (
        "a target",
        "a `Backend`, registered in any module; each file in backends/targets registers built-in targets",
        "test_plugin_adds_targets",
    ),
    (
        "a kind of state",
        "the `StateSpec` of an op, and a lowering for each backend that does not use the op's body",
        "test_plugin_adds_a_state",
    ),
)
ADDITIONS = "tests/plugins/test_plugins.py"


@dataclass
class Room:
    """A folder: its docstring, and its loose files by name with their lines."""

    path: str
    doc: str
    files: dict[str, int] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return sum(self.files.values())

    @property
    def most(self) -> int:
        """The number of loose files that it may have."""
        return CATALOGUE if self.path in CATALOGUES else MACHINERY


class House:
    """The four folders at `root`, as modules and their imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: dict[str, Path] = {}
        for floor in FLOORS:
            for path in sorted((root / floor).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    @cached_property
    def rooms(self) -> dict[str, Room]:
        """Every room by its path."""
        rooms: dict[str, Room] = {}
        for module, path in self.paths.items():
            text = path.read_text(encoding="utf-8")
            if path.name == "__init__.py":
                name = module.replace(".", "/")
                rooms[name] = Room(
                    name, ast.get_docstring(ast.parse(text)) or "", rooms.get(name, Room(name, "")).files
                )
            else:
                name = path.parent.relative_to(self.root).as_posix()
                rooms.setdefault(name, Room(name, "")).files[path.stem] = len(text.splitlines())
        return dict(sorted(rooms.items()))

    @cached_property
    def lines(self) -> int:
        """Lines of Python in all."""
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in self.paths.values())

    @cached_property
    def imports(self) -> nx.DiGraph:
        """Imports between modules, including those for type checking and those within functions."""
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(self.paths)
        for module, path in self.paths.items():
            graph.add_edges_from((module, other) for other in self._imported(module, path) if other != module)
        return graph

    def _imported(self, module: str, path: Path) -> Iterator[str]:
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (a.name[5:] for a in node.names if a.name[5:] in self.paths and a.name[:5] == "weft.")
            elif isinstance(node, ast.ImportFrom):
                within = package[: len(package) - node.level + 1] if node.level else ["weft"]
                base = ".".join([*within, *([node.module] if node.module and node.level else [])])
                base = base if node.level else (node.module or "").removeprefix("weft.")
                for alias in node.names:
                    yield from [name for name in (f"{base}.{alias.name}", base) if name in self.paths][:1]

    def circles(self) -> list[list[str]]:
        """Sets of modules that import each other."""
        return [sorted(c) for c in nx.strongly_connected_components(self.imports) if len(c) > 1]

    def climbs(self) -> list[tuple[str, list[str]]]:
        """Rooms in which what lies side by side imports each other, in a circle: (room, files and rooms in it)."""
        found = []
        for room in ("", *self.rooms):
            beside: nx.DiGraph = nx.DiGraph()
            for one, other in self.imports.edges:
                a, b = _child(one, room), _child(other, room)
                if a and b and a != b:
                    beside.add_edge(a, b)
            found += [(room, sorted(c)) for c in nx.strongly_connected_components(beside) if len(c) > 1]
        return found

    def order(self, room: str) -> list[str]:
        """The rooms in `room`, those that import nothing of the others first."""
        names = [r.rpartition("/")[2] for r in self.rooms if r.rpartition("/")[0] == room]
        beside: nx.DiGraph = nx.DiGraph()
        beside.add_nodes_from(names)
        for one, other in self.imports.edges:
            a, b = _child(one, room), _child(other, room)
            if a and b and a != b and a in names and b in names:
                beside.add_edge(b, a)
        return list(nx.lexicographical_topological_sort(beside))


def _child(module: str, room: str) -> str:
    """The file or room in `room` that has `module`; "" if none has, or it is the room's own `__init__`."""
    within = room.replace("/", ".")
    rest = module.removeprefix(f"{within}.") if room else module
    return "" if room and (rest == module or module == within) else rest.partition(".")[0]


def page(house: House, walks: Mapping[str, Walk]) -> str:
    """Return the text of docs/house.md. `walks` maps each target to the walk through a compilation for it."""
    lines = [
        "# Map of the code",
        "",
        "This page lists the folders of the code with the first paragraph of their docstrings. Each of the four top "
        "folders imports only from those listed above it; so does each subfolder among the subfolders of one folder. "
        "The line `Never here:` of a docstring states what does not belong in the folder.",
        "[CONTRIBUTING](../CONTRIBUTING.md#where-to-add-things) lists where to add things.",
        "`python -m tests.house` generates this page; a test compares it with the code.",
        "",
        "| | lines of Python | files | folders |",
        "|---|---|---|---|",
    ]
    for floor in FLOORS:
        rooms = [r for name, r in house.rooms.items() if name == floor or name.startswith(f"{floor}/")]
        paths = [p for m, p in house.paths.items() if m.split(".")[0] == floor]
        count = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in paths)
        lines.append(f"| {floor}/ | {count:,} | {len(paths)} | {len(rooms)} |")
    lines += [
        f"| all | {house.lines:,} | {len(house.paths)} | {len(house.rooms)} |",
        "",
        f"Tests check these limits: no import cycles; {LONGEST} lines per file; {MACHINERY} files per folder "
        f"({CATALOGUE} in folders of similar items, such as ops), without subfolders and `__init__.py`.",
    ]
    lines += [
        "",
        "## What an extension must define",
        "",
        f"An extension is a module of another package ([extending.md](extending.md)). The tests are in {ADDITIONS}.",
        "",
        "| to add | define | test |",
        "|---|---|---|",
        *(f"| {addition} | {definition} | {test} |" for addition, definition, test in PLACES),
    ]
    lines += [
        "",
        "## Files that a compilation runs",
        "",
        "The number of files whose code runs in each stage of `weft compile`, for a small model (tests/walk.py). "
        "The last column counts calls from a stage into an earlier stage.",
        "",
        f"| target | {' | '.join(ORDER)} | calls back |",
        f"|---|{'---|' * len(ORDER)}---|",
        *(
            f"| {target} | {' | '.join(str(len(found.files[s])) for s in ORDER)} | {len(found.climbs)} |"
            for target, found in walks.items()
        ),
    ]
    lines += ["", "Below, the numbers in brackets exclude subfolders and `__init__.py`."]
    for floor in FLOORS:
        lines += ["", f"## {floor}/", "", "```text", *_drawn(house, floor, 0), "```"]
    return "\n".join(lines) + "\n"


def _drawn(house: House, room: str, depth: int) -> Iterator[str]:
    """Yield a line for `room` and for every room in it: name, number and lines of loose files, docstring."""
    here = house.rooms[room]
    summary = " ".join(here.doc.split("\n\n")[0].split()).removesuffix(" ::")
    name = "  " * depth + (room if not depth else room.rpartition("/")[2]) + "/"
    files = (
        f"[{len(here.files)} file{'s' if len(here.files) != 1 else ''}, {here.lines:,} lines] " if here.files else ""
    )
    yield f"{name:<22} {files}{summary}"
    for inner in house.order(room):
        yield from _drawn(house, f"{room}/{inner}", depth + 1)


if __name__ == "__main__":
    here = Path(__file__).parent.parent
    (here / "docs" / "house.md").write_text(page(House(here), {t: compiled(t) for t in TARGETS}), encoding="utf-8")
