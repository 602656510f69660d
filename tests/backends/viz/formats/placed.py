"""Pictures placed in their states, and one with names that need escaping."""

from __future__ import annotations

from weft.backends.viz.formats.style import Sheet
from weft.backends.viz.layout.coordinates import PlacedShape, place_shapes
from weft.backends.viz.layout.scene import ALL, Shape, build_scene, list_default_open
from weft.backends.viz.model.network import Network, Vertex

from ..pages import drawn

PRESETS = ("llama3.1-8b", "deepseek-v3", "t5-base", "mamba-130m", "gpt3-175b")


def place_default(preset: str) -> PlacedShape:
    root = drawn(preset)
    return place_shapes(root, list_default_open(root))


def place_everything(root: Shape) -> PlacedShape:
    """Every operation in a box of its own, or in that of what it views or adds to."""
    opened = {s.key for s in root.all() if s.arrangement} | {s.key + ALL for s in root.all() if s.part.count > 1}
    for _ in range(4):  # what stands in opened layers is opened too
        opened |= {p.shape.key for p in place_shapes(root, opened).all() if p.shape.arrangement}
    return place_shapes(root, opened)


def place_odd_name(name: str) -> PlacedShape:
    """Two operations, the second in a scope and with a name that no language likes."""
    vertices = (
        Vertex("a", "relu", "", ("x",), ("a",), ("x",), ("f32[2]",)),
        Vertex(name, "gelu", "", ("a",), (name,), ("x",), ("f32[2]",)),
    )
    root = build_scene(Network('say "it"', vertices, {"x": "f32[2]"}, {"y": (name, "f32[2]")}))
    return place_shapes(root, [root.key])


BARE = Sheet("title", "", ())  # of a model that has nothing to say


ODD = 'a"b\\n<i>`c` #1; {d} | e\n# &f\x1b[2J'


ODD_LINE = ODD.replace("\n", " ").replace("\x1b", " ")  # as pictures show it
