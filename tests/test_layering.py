"""ir < passes < backends < frontends: relative imports inside one of them, `weft.<folder>` across, downward only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from weft.backends.torch.ops.custom_recurrences import write_function
from weft.ir import ops

from .house import ADDITIONS, CATALOGUES, PLACES, House, page
from .walk import TARGETS, Walk, compiled, walk

LAYERS = ("ir", "passes", "backends", "frontends")


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer: str, root: Path) -> None:
    lower = {f"weft.{name}" for name in LAYERS[: LAYERS.index(layer)]} | {"weft.__version__"}
    wrong = []
    for path in sorted((root / layer).rglob("*.py")):
        depth = len(path.relative_to(root).parts) - 1
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = ["weft"] if isinstance(node, ast.ImportFrom) and node.level > depth else []
            ours = [name for name in names if name.split(".")[0] in ("weft", *LAYERS)]
            wrong += [f"{path}:{node.lineno}: {name}" for name in ours if ".".join(name.split(".")[:2]) not in lower]
    assert not wrong


@pytest.fixture(scope="module")
def house(root: Path) -> House:
    return House(root)


def test_modules_do_not_import_in_circles(house: House) -> None:
    """Nor for type checking: a type that two modules need stands in a third."""
    assert house.circles() == []


def test_imports_run_one_way_between_rooms(house: House) -> None:
    """At every level of the tree: what lies side by side in a folder never imports each other in circles."""
    assert house.climbs() == []


def test_rooms_have_few_files(house: House) -> None:
    assert {room.path: len(room.files) for room in house.rooms.values() if len(room.files) > room.most} == {}
    assert set(CATALOGUES) <= set(house.rooms)


def test_rooms_have_a_docstring(house: House) -> None:
    silent = [
        room.path for room in house.rooms.values() if "ever here:" not in room.doc and room.path not in CATALOGUES
    ]
    assert silent == [] and all(room.doc for room in house.rooms.values())


def test_every_addition_is_shown_by_a_test(root: Path) -> None:
    text = (root / ADDITIONS).read_text(encoding="utf-8")
    assert [test for _, _, test in PLACES if f"def {test}(" not in text] == []


def test_room_docstrings_name_existing_files(house: House) -> None:
    """A lower-case name in backticks is a module, or something defined in one of the room or of those around it."""
    wrong = []
    for room in house.rooms.values():
        for name in set(re.findall(r"`([a-z_]+)`", room.doc)) - {"nn", "math", "weft", "_"}:  # they stand for others
            around = [room.path, *(str(p) for p in Path(room.path).parents)]
            places = {f"{place}/{name}" for place in around} | {f"{place}/{name}.py" for place in around}
            inside = (p for m, p in house.paths.items() if p.is_relative_to(house.root / room.path))
            known = any((house.root / place).exists() for place in places) or any(
                re.search(rf"\b(def|class) {name}\b|^{name}\b", p.read_text(encoding="utf-8"), re.M) for p in inside
            )
            wrong += [] if known else [f"{room.path}: {name}"]
    assert wrong == []


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return {target: compiled(target) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_compilation_proceeds_from_stage_to_stage(walks: dict[str, Walk], target: str) -> None:
    """Source, passes, build, write."""
    assert walks[target].climbs == []
    assert all(walks[target].files.values())


def test_climbs_are_detected() -> None:
    """The step of a recurrence is legalized where it is written as a function."""
    graph = ops.scan.cases[0].attrs["step"].graph
    found = walk(lambda: write_function(graph, [*graph.outputs], "One token of"))
    assert ("backends/torch/ops/custom_recurrences.py", "passes/edits/legalization.py") in found.climbs


def test_house_page_equals_the_code(house: House, walks: dict[str, Walk], root: Path) -> None:
    """`python -m tests.house` writes it; lines may have changed by a tenth since."""
    written, now = (root / "docs" / "house.md").read_text(encoding="utf-8"), page(house, walks)
    number = re.compile(r"\d[\d,]*(?= lines| \|)")
    assert " ".join(number.sub("", written).split()) == " ".join(number.sub("", now).split())
    counts = ([int(n.replace(",", "")) for n in number.findall(text)] for text in (written, now))
    assert all(abs(a - b) <= max(20, b / 10) for a, b in zip(*counts, strict=True))
