"""A network as shapes: what may be drawn, whether open or closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..model.labels import Label, label, titled
from ..model.network import Network
from ..model.outline import Part, outline
from .arrange import END, START, Arrangement, Branches, Column, Item, Line, arrange
from .font import width
from .notes import captions

TITLE, LINE = 13.0, 11.0  # sizes of text
LEADING = 15.0  # from line to line
ROUND = 24.0  # a circle
MARGIN = 12.0  # beside text in a box
NARROWEST = 72.0
ICON = 16.0  # the mark of a kind, and what tells that a box can be opened
BADGE = 70.0  # room beside the title for how often a part is computed
ALL = "*"  # after a key: a repeat is to be drawn as often as it is computed


@dataclass(frozen=True)
class Size:
    """Width and height, and the x of the vertical line that passes through."""

    width: float
    height: float
    axis: float


@dataclass
class Shape:
    """A part of the picture: what is written on it, how large it is when closed, and what is in it when open.

    `notes` are values that the part reads and no line brings, `gives` outputs of the model that it makes and no line
    takes, `leaves` such values that others read. `head` is the least width of an open part. The picture itself knows
    its `network`.
    """

    key: str
    part: Part
    label: Label
    notes: tuple[str, ...]
    gives: tuple[str, ...]
    leaves: tuple[str, ...]
    closed: Size
    head: float
    arrangement: Arrangement | None = None
    inner: list[Shape] = field(default_factory=list)
    network: Network | None = None

    @property
    def captions(self) -> list[str]:
        """The lines about what it reads and makes without a line."""
        return list(captions(self.part, self.notes, self.gives, self.leaves))

    def all(self) -> Iterator[Shape]:
        """The shape and all that may be drawn in it, of repeats the first time only."""
        yield self
        for shape in self.inner:
            yield from shape.all()


def scene(network: Network) -> Shape:
    """The shapes of `network`; the root is the picture itself, always open."""
    return replace(shapes(outline(network)), network=network)


def unfolded(root: Shape) -> set[str]:
    """The keys of what is open at first: layers, and what they are in."""
    return {s.key for s in root.all() if s is root or (s.arrangement is not None and s.part.layered)}


def times(shape: Shape) -> Shape:
    """A repeat with a part for each time that it is computed, in the place of the first one alone."""
    part = shape.part
    rounds = [_once(part, body) for body in (part.children, *part.others)]
    later = {name for body in part.others for child in body for name in child.read}
    needed = _wanted(part, ()) if part.parallel else later
    first, last = (shapes(once, *_borders(once, needed)) for once in (rounds[0], rounds[-1]))
    # Titles tell the number of a layer, whose last has the most digits: all times get the width of the wider end.
    widest, head = max(first.closed, last.closed, key=lambda size: size.width), max(first.head, last.head)
    inner = [replace(_like(first, once, _names(first.part, once)), closed=widest, head=head) for once in rounds]
    numbers = range(len(rounds))
    if part.parallel:
        box = Column((Branches(tuple(Column((Item(i),)) for i in numbers), False),))
        lines = [Line(START, i, _through(inner[i], START), "fork", (0,)) for i in numbers]
        lines += [Line(i, END, _through(inner[i], END), "merge", (0,)) for i in numbers]
    else:
        box = Column(tuple(map(Item, numbers)))
        lines = [Line(i - 1 if i else START, i, _through(inner[i], START)) for i in numbers]
        lines.append(Line(len(rounds) - 1, END, _through(inner[-1], END)))
    rails = beside(part, first, rounds[-1])
    lines += [Line(START, i, (name,), "rail", (k,)) for k, name in enumerate(rails) for i in numbers]
    arrangement = Arrangement([s.part for s in inner], box, lines, rails=len(rails))
    return replace(shape, arrangement=arrangement, inner=inner)


def _through(shape: Shape, edge: int) -> tuple[str, ...]:
    """The values that go over the edge of an open shape, by START or END, but for those along its right side."""
    lines = shape.arrangement.lines if shape.arrangement is not None else []
    ends = (line for line in lines if edge in (line.source, line.target) and line.bend != "rail")
    return tuple(dict.fromkeys(name for line in ends for name in line.values))


def beside(part: Part, first: Shape, last: Part) -> list[str]:
    """The values that come along the right side into every time of the repeat `part`, of which `last` is the last."""
    lines = first.arrangement.lines if first.arrangement is not None and not part.parallel else []
    rails = {line.region: line.values[0] for line in lines if line.bend == "rail"}
    return [name for _, name in sorted(rails.items()) if name in last.read]


def _once(part: Part, body: list[Part]) -> Part:
    """One time of the repeat `part`."""
    if len(body) == 1:
        return body[0]
    first, last = body[0], body[-1]
    name = f"{first.name.partition('-')[0]}-{last.name.rpartition('-')[2]}"
    stem = first.path.rpartition(".")[0]
    return Part(name, f"{stem}.{name}" if stem else name, (), body)


def _names(first: Part, other: Part) -> dict[str, str]:
    """Map the value names of `first` to those of `other`, a part that differs in names only."""
    pairs = zip(first.all_vertices(), other.all_vertices(), strict=True)
    return {a: b for v, w in pairs for a, b in zip((*v.reads, *v.makes), (*w.reads, *w.makes), strict=True)}


def _like(shape: Shape, part: Part, names: Mapping[str, str]) -> Shape:
    """Copy `shape` for another part that differs in names only; `names` maps the names of its values."""

    def called(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(v, v) for v in values)

    inner = [_like(s, p, names) for s, p in zip(shape.inner, part.body.children, strict=True)]
    around = shape.arrangement
    if around is not None:
        around = replace(around, lines=[replace(line, values=called(line.values)) for line in around.lines])
    return replace(
        shape,
        key=part.path,
        part=part,
        label=_label(part, shape.notes),
        notes=called(shape.notes),
        gives=() if part.layered else part.gives,
        leaves=called(shape.leaves),
        arrangement=around,
        inner=inner,
    )


def shapes(
    part: Part,
    entering: tuple[str, ...] = (),
    leaving: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    leaves: tuple[str, ...] = (),
) -> Shape:
    """The shapes of an outline, whose root is the picture itself, or of a part that reads the values `entering`."""
    if part.layered:
        notes = tuple(name for name in notes if name not in part.takes)
    text, gives = _label(part, notes), () if part.layered else part.gives
    arrangement, inner = None, list[Shape]()
    if part.children:
        arrangement, needed = arrange(part.body.children, entering, leaving), _wanted(part.body, leaving)
        for i, child in enumerate(part.body.children):
            extra = tuple(arrangement.notes.get(i, ())), tuple(arrangement.gives.get(i, ()))
            inner.append(shapes(child, *_borders(child, needed), *extra))
    lines = [*text.lines, *captions(part, notes, gives, leaves)]
    size = Size(ROUND, ROUND, ROUND / 2)
    if not text.symbol:
        beside = ICON + (ICON if inner else 0) + (BADGE if part.count > 1 else 0)
        wide = max(width(text.title, TITLE, True) + beside, *(width(t, LINE) for t in lines), 0)
        wide = max(wide + 2 * MARGIN, NARROWEST)
        size = Size(wide, 32 + LEADING * len(lines), wide / 2)
    head = width(text.title, TITLE, True) + 2 * MARGIN + ICON + BADGE
    return Shape(part.path, part, text, notes, gives, leaves, size, head, arrangement, inner)


def _label(part: Part, notes: tuple[str, ...]) -> Label:
    """Label `part`: in words instead of a symbol, if it has notes for which a circle is too small."""
    text = label(part)
    return replace(text, title=titled(part.vertices[0].meant), symbol="") if notes and text.symbol else text


def _wanted(parent: Part, leaving: tuple[str, ...]) -> set[str]:
    """The values that children of `parent` read of each other, or from outside, and those that leave it."""
    return {name for child in parent.children for name in child.read} | {*leaving}


def _borders(child: Part, needed: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values that come into `child`, and those that leave it: what is `needed` around it, or in its later times."""
    later = {name for body in child.others for part in body for name in part.read}
    return tuple(child.read), tuple(name for name in child.made if name in needed or name in later)
