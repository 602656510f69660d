"""The shapes of a network, with their sizes and contents, for any open or closed state; and the parts to open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from weft.ir.errors import unknown_name_error

from ..model.labels import Label, choose_title, label_part
from ..model.network import Network
from ..model.outline import PicturePart, build_outline
from .arrange import END, START, Arrangement, Branches, Column, Item, Line, arrange
from .font import measure_text

TITLE, LINE = 13.0, 11.0  # font sizes
LEADING = 15.0  # from line to line
ROUND = 24.0  # a circle
MARGIN = 12.0  # left and right of text in a box
NARROWEST = 72.0
ICON = 16.0  # the mark of a kind, and the sign that a box can be opened
BADGE = 70.0  # room next to the title for the number of repetitions
ALL = "*"  # suffix of a key: draw every round of a repeat


@dataclass(frozen=True)
class Size:
    """The width and height of a box, and the distance of its vertical line (`axis`) from its left edge, in pixels."""

    width: float
    height: float
    axis: float


@dataclass
class Shape:
    """A part of the picture: its label, its size when closed (`closed`), and its contents when open.

    `notes`: values that the part reads without a line.
    `layer_outputs`: outputs of the model that belong to a layer and that it produces; () if it contains layers.
    `unwired_results`: its results that other parts read without a line.
    `head`: the minimum width when open.
    `arrangement`, `inner`: the arrangement of its children and their shapes; None and empty if it cannot be opened.
    `network`: set for the root only.
    """

    key: str
    part: PicturePart
    label: Label
    notes: tuple[str, ...]
    layer_outputs: tuple[str, ...]
    unwired_results: tuple[str, ...]
    closed: Size
    head: float
    arrangement: Arrangement | None = None
    inner: list[Shape] = field(default_factory=list)
    network: Network | None = None

    @property
    def captions(self) -> list[str]:
        """Return the captions (at most two) of the values of the part that no drawn line connects to it."""
        return list(write_captions(self.part, self.notes, self.layer_outputs, self.unwired_results))

    def all(self) -> Iterator[Shape]:
        """Yield this shape, then all shapes in it; of a repeat that is not unrolled only the first round."""
        yield self
        for shape in self.inner:
            yield from shape.all()


def build_scene(network: Network) -> Shape:
    """Return the root shape of `network`: the entire picture, which contains all other shapes and is always open."""
    return replace(build_shape(build_outline(network)), network=network)


def list_default_open(root: Shape) -> set[str]:
    """Return the keys of the shapes that are open by default: `root`, layers and containers of layers."""
    return {s.key for s in root.all() if s is root or (s.arrangement is not None and s.part.has_layers)}


def unroll_repeat(shape: Shape) -> Shape:
    """Return a copy of the repeat `shape` with one inner shape for each of its rounds."""
    part = shape.part
    rounds = [_wrap_round(body) for body in (part.children, *part.later_rounds)]
    later = {name for body in part.later_rounds for child in body for name in child.read}
    needed = _find_needed(part, ()) if part.parallel else later
    first, last = (build_shape(once, *_find_border_values(once, needed)) for once in (rounds[0], rounds[-1]))
    # Titles have layer numbers, of which the last has most digits: all rounds get the width of the wider end.
    widest, head = max(first.closed, last.closed, key=lambda size: size.width), max(first.head, last.head)
    inner = [replace(_copy_for(first, once, _map_names(first.part, once)), closed=widest, head=head) for once in rounds]
    numbers = range(len(rounds))
    if part.parallel:
        box = Column((Branches(tuple(Column((Item(i),)) for i in numbers), False),))
        lines = [Line(START, i, _find_crossing_values(inner[i], START), "fork", (0,)) for i in numbers]
        lines += [Line(i, END, _find_crossing_values(inner[i], END), "merge", (0,)) for i in numbers]
    else:
        box = Column(tuple(map(Item, numbers)))
        lines = [Line(i - 1 if i else START, i, _find_crossing_values(inner[i], START)) for i in numbers]
        lines.append(Line(len(rounds) - 1, END, _find_crossing_values(inner[-1], END)))
    rails = find_rails(part, first, rounds[-1])
    lines += [Line(START, i, (name,), "rail", (k,)) for k, name in enumerate(rails) for i in numbers]
    arrangement = Arrangement([s.part for s in inner], box, lines, rails=len(rails))
    return replace(shape, arrangement=arrangement, inner=inner)


def _find_crossing_values(shape: Shape, edge: int) -> tuple[str, ...]:
    """Return the values on lines that cross `edge` (START or END) of the open `shape`, except rails."""
    lines = shape.arrangement.lines if shape.arrangement is not None else []
    ends = (line for line in lines if edge in (line.source, line.target) and line.bend != "rail")
    return tuple(dict.fromkeys(name for line in ends for name in line.values))


def find_rails(part: PicturePart, first: Shape, last: PicturePart) -> list[str]:
    """Return the values that enter every round of the repeat `part` on a rail, outermost first: those on rails of
    `first`, the shape of its first round, that `last`, its last round, also reads. Return [] if rounds are parallel."""
    lines = first.arrangement.lines if first.arrangement is not None and not part.parallel else []
    rails = {line.region: line.values[0] for line in lines if line.bend == "rail"}
    return [name for _, name in sorted(rails.items()) if name in last.read]


def _wrap_round(body: list[PicturePart]) -> PicturePart:
    """Return one round of a repeat, with the children `body`, as a part; a single child is returned itself."""
    if len(body) == 1:
        return body[0]
    first, last = body[0], body[-1]
    name = f"{first.name.partition('-')[0]}-{last.name.rpartition('-')[2]}"
    stem = first.path.rpartition(".")[0]
    return PicturePart(name, f"{stem}.{name}" if stem else name, (), body)


def _map_names(first: PicturePart, other: PicturePart) -> dict[str, str]:
    pairs = zip(first.all_vertices(), other.all_vertices(), strict=True)
    return {a: b for v, w in pairs for a, b in zip((*v.reads, *v.makes), (*w.reads, *w.makes), strict=True)}


def _copy_for(shape: Shape, part: PicturePart, names: Mapping[str, str]) -> Shape:
    """Return a copy of `shape` for `part`, which differs only in names; `names` maps old value names to new ones."""

    def rename(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(v, v) for v in values)

    inner = [_copy_for(s, p, names) for s, p in zip(shape.inner, part.body.children, strict=True)]
    around = shape.arrangement
    if around is not None:
        around = replace(around, lines=[replace(line, values=rename(line.values)) for line in around.lines])
    return replace(
        shape,
        key=part.path,
        part=part,
        label=_label_shape(part, shape.notes),
        notes=rename(shape.notes),
        layer_outputs=() if part.has_layers else part.layer_outputs,
        unwired_results=rename(shape.unwired_results),
        arrangement=around,
        inner=inner,
    )


def build_shape(
    part: PicturePart,
    entering: tuple[str, ...] = (),
    leaving: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    unwired_results: tuple[str, ...] = (),
) -> Shape:
    """Return the shape of `part`, with the shapes of all parts in it.

    `entering` are the values that the part reads, `leaving` its results that other parts read. Of these, `notes` and
    `unwired_results` are the values without a line.
    """
    if part.has_layers:
        notes = tuple(name for name in notes if name not in part.layer_inputs)
    text, layer_outputs = _label_shape(part, notes), () if part.has_layers else part.layer_outputs
    arrangement, inner = None, list[Shape]()
    if part.children:
        arrangement, needed = arrange(part.body.children, entering, leaving), _find_needed(part.body, leaving)
        for i, child in enumerate(part.body.children):
            extra = tuple(arrangement.notes.get(i, ())), tuple(arrangement.unwired_results.get(i, ()))
            inner.append(build_shape(child, *_find_border_values(child, needed), *extra))
    lines = [*text.lines, *write_captions(part, notes, layer_outputs, unwired_results)]
    size = Size(ROUND, ROUND, ROUND / 2)
    if not text.symbol:
        badges = ICON + (ICON if inner else 0) + (BADGE if part.count > 1 else 0)
        wide = max(measure_text(text.title, TITLE, True) + badges, *(measure_text(t, LINE) for t in lines), 0)
        wide = max(wide + 2 * MARGIN, NARROWEST)
        size = Size(wide, 32 + LEADING * len(lines), wide / 2)
    head = compute_head(text.title)
    return Shape(part.path, part, text, notes, layer_outputs, unwired_results, size, head, arrangement, inner)


def compute_head(title: str) -> float:
    """Return the minimum width in pixels of an open shape with this title."""
    return measure_text(title, TITLE, True) + 2 * MARGIN + ICON + BADGE


def _label_shape(part: PicturePart, notes: tuple[str, ...]) -> Label:
    """Return the label of `part`. If there are notes, which fit into no circle, the label has no `symbol`."""
    text = label_part(part)
    return replace(text, title=choose_title(part.vertices[0].weft_op), symbol="") if notes and text.symbol else text


def _find_needed(parent: PicturePart, leaving: tuple[str, ...]) -> set[str]:
    return {name for child in parent.children for name in child.read} | {*leaving}


def _find_border_values(child: PicturePart, needed: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the values that `child` reads, and its results that are in `needed` or read by its own later rounds."""
    later = {name for body in child.later_rounds for part in body for name in part.read}
    return tuple(child.read), tuple(name for name in child.results if name in needed or name in later)


def select_open(root: Shape, depth: int | None = None, parts: Iterable[str] = ()) -> set[str]:
    """Return the keys of the shapes to open: `root`, those chosen by `depth`, and `parts` with their containers.

    `depth`: the maximum number of containers of an open shape (0: `root` only); None: layers and their containers.
    `parts`: keys, or ends of keys that name every part with that end ("attn").

    Raises:
        WeftError: if no part that can be opened has such a name.
    """
    above = dict(_list_containers(root, ()))
    keys = list_default_open(root) if depth is None else {key for key, around in above.items() if len(around) <= depth}
    above.pop(root.key, None)  # always open
    for name in parts:
        matches = [key for key in above if f".{key}".endswith(f".{name}")]
        if not matches:
            hint = "name a part by its path or the end of its path, such as layers.0.attn or attn"
            raise unknown_name_error("part", name, above, hint)
        keys.update(key for m in matches for key in (m, *above[m]))
    return keys


def _list_containers(shape: Shape, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (key, keys of its containers, outermost first) for `shape` and each shape inside it that can open; `keys`
    are the containers of `shape`."""
    if shape.arrangement is not None:
        yield shape.key, keys
        for inner in shape.inner:
            yield from _list_containers(inner, (*keys, shape.key))


PAST = "past"  # prefix of inputs with caches and states of earlier tokens


def write_captions(
    part: PicturePart, read: Iterable[str], layer_outputs: Iterable[str], results: Iterable[str]
) -> Iterator[str]:
    """Yield at most two captions of `part`, for values without a line: "with …" lists the operands in `read`; "gives …"
    lists the model outputs in `layer_outputs` and then the values in `results`, which other parts read."""
    names = list(dict.fromkeys(abbreviate_value(name, part.path, name in part.shared) for name in read))
    past = [name.removeprefix(f"{PAST} ") for name in names if name.startswith(f"{PAST} ")]
    current = [name for name in names if not name.startswith(f"{PAST} ")]
    if past:
        current.append(f"{PAST} {', '.join(past)}")
    if current:
        yield f"with {', '.join(current)}"
    outputs = [drop_number(name) for name in layer_outputs]
    if outputs:
        stem = outputs[0].partition(" ")[0]
        outputs = [f"{stem} {', '.join(name.removeprefix(f'{stem} ') for name in outputs)}"]
    if outputs := [*outputs, *dict.fromkeys(abbreviate_value(name, part.path) for name in results)]:
        yield f"gives {', '.join(outputs)}"


def abbreviate_value(value: str, path: str, shared: bool = False) -> str:
    """Return a short name of `value` for a caption of the part at `path`, without the scopes common to both names.

    "layers.0.attn.k" in "layers.0.attn": "k"
    "layers.0.attn.k" in "layers.0": "attn output"
    "encoder.norm" in "decoder.layers.0": "encoder output"
    "layers.0.mlp.down" in "layers.1": "mlp of the layer before"; if `shared` (all layers read it) "mlp of layer 0"
    "past_key_values.3.key" anywhere: "past key"
    """
    if value.startswith(PAST):
        return drop_number(value)
    inner, here = value.split("."), path.split(".")
    while len(inner) > 1 and here and inner[0] == here[0]:
        inner, here = inner[1:], here[1:]
    if inner[0].isdigit() and len(inner) > 1:
        before = not shared and here[:1] and here[0].isdigit() and int(here[0]) == int(inner[0]) + 1
        return f"{inner[1]} of {'the layer before' if before else f'layer {inner[0]}'}"
    words = [word for word in inner if not word.isdigit()]
    return words[0] if len(words) < 2 else f"{words[0]} output"


def drop_number(name: str) -> str:
    """Return the first and last word of `name` that are not digits ("past key" for "past_key_values.3.key"), or `name`
    if it has fewer than two words."""
    words = [word for word in name.replace("_", ".").split(".") if word and not word.isdigit()]
    return f"{words[0]} {words[-1]}" if len(words) > 1 else name
