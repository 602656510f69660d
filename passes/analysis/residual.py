"""The residual stream: the values that residual additions connect, what writes into them and what reads them.

Scaling, centring or rotating the whole stream is one linear map of its rows: every writer makes mapped rows, every
reader undoes the map, and what only adds, moves or weighs rows in between need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait

from ..edits.absorb import WRITERS, AxisMap, find_computed_weight, moves_rows, write_through
from ..edits.edit import backward_slice, derive, replace_param


@dataclass
class Stream:
    """One residual stream of rows of `width`.

    `values` carry it. `writers` are the nodes, or parameters that are added, whose rows enter it; `norms` and `linears`
    those that read it. `obstacles` say what else writes or reads it.
    """

    width: int
    values: dict[Value, None] = field(default_factory=dict)
    writers: dict[Node | Param, Value] = field(default_factory=dict)
    norms: dict[Node, None] = field(default_factory=dict)
    linears: dict[Node, None] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)


def streams(graph: Graph) -> list[Stream]:
    """Every residual stream of `graph` that a norm reads, in order: one in a pre-norm decoder, several where norms of
    sums are summands in turn (post-norm), and those of encoder and decoder.
    """
    found: list[Stream] = []
    seen: set[Value] = set()
    for node in graph.nodes:
        if node.op in (ops.add, ops.add_norm) and node.outputs[-1] not in seen and _residual(node):
            stream = _connected(node.outputs[-1])
            seen.update(stream.values)
            if stream.norms:
                found.append(stream)
    return found


def residual_streams(graph: Graph, rule: str) -> list[Stream]:
    """The `streams` of `graph`.

    Raises:
        WeftError: naming `rule`, if there is none.
    """
    found = streams(graph)
    if not found:
        raise WeftError(f"{rule}: graph {graph.name} has no residual stream: no norm reads a sum of two values")
    return found


def tables(streams: Sequence[Stream]) -> Iterator[Value]:
    """The tables that are looked up for `streams`."""
    for stream in streams:
        for writer in stream.writers:
            table = writer.operand("table") if isinstance(writer, Node) and writer.op is ops.embedding else None
            if table is not None:
                yield table


def require(streams: Sequence[Stream], rule: str, obstacle: Callable[[Stream], str | None]) -> None:
    """Every one of `streams` can be mapped.

    Raises:
        WeftError: naming `rule` and the first `obstacle`, or what else reads or writes a stream.
    """
    for stream in streams:
        if why := obstacle(stream) or next(iter(stream.obstacles), None):
            raise WeftError(f"{rule}: the residual stream cannot be changed: {why}")


def _residual(node: Node) -> bool:
    x, y = node.inputs[:2]
    if x is None or y is None or isinstance(x, Param) or isinstance(y, Param) or x.type != y.type:
        return False
    return x.type.dtype.is_float and len(x.shape) > 1 and isinstance(x.shape[-1], int)


def _connected(start: Value) -> Stream:
    stream = Stream(start.width, {start: None})
    waiting = [start]

    def visit(*values: Value | None) -> None:
        for v in values:
            if v is not None and v not in stream.values:
                stream.values[v] = None
                waiting.append(v)

    # `waiting` grows during the walk: a breadth-first search in both directions, producers and readers.
    for value in waiting:
        node = value.producer
        if isinstance(value, Param):
            stream.writers[value] = value
            continue  # its other readers are none of this stream's
        if node is None:
            stream.obstacles.append(f"%{value.name} is an input of the graph")
        elif operands := carried(node, value):
            visit(*(node.inputs[i] for i in operands), *(v for v in node.outputs if carried(node, v)))
        else:
            stream.writers[node] = value
        if value.is_output:
            stream.obstacles.append(f"%{value.name} is an output of the graph")
        for reader, i in value.uses:
            outputs = [v for v in reader.outputs if i in carried(reader, v)]
            visit(*outputs)
            for out in outputs:
                visit(*(reader.inputs[j] for j in carried(reader, out)))
            _note(stream, value, reader, i, bool(outputs))
    return stream


def _note(stream: Stream, value: Value, reader: Node, index: int, carries: bool) -> None:
    """Put the reader of a value of the stream where it belongs; `carries` says that it carries the stream on."""
    if reader.op is ops.add_norm or ((Trait.NORM in reader.op.traits or reader.op is ops.norm_linear) and index == 0):
        stream.norms[reader] = None
    elif reader.op is ops.linear and index == 0:
        stream.linears[reader] = None
    elif not carries:
        stream.obstacles.append(f"%{value.name} is read by {reader.op.name} (%{reader.output.name})")


def carried(node: Node, output: Value) -> tuple[int, ...]:
    """The operands whose rows `node` adds, moves or weighs to make `output`; none if it does more with them."""
    width = output.shape[-1:]
    wide = tuple(i for i, v in enumerate(node.inputs) if v is not None and v.shape[-1:] == width)
    match node.op:
        case ops.add | ops.sub:
            return wide if len(wide) == 2 else ()
        case ops.add_norm:
            # Output 1 is the sum; output 0 is normed and no longer the stream.
            return (0, 1) if output.index == 1 else ()
        case ops.affine:
            # An added constant would not be mapped with the rows.
            return (0,) if node.attrs["plus"] == 0 else ()
        case ops.mul:  # by a number for every row
            other = node.inputs[1 - wide[0]] if len(wide) == 1 else None
            return wide if other is not None and other.shape[-1:] in ((), (1,)) else ()
        case ops.concat:
            return wide if moves_rows(node) else ()
    return (0,) if moves_rows(node) and not isinstance(node.inputs[0], Param) else ()


def unwritable(stream: Stream, norms: bool = False) -> str | None:
    """Name what writes into the stream without weights that could absorb a map; `norms` allows norms to write."""
    for writer, value in stream.writers.items():
        if isinstance(writer, Param):
            continue
        if Trait.NORM in writer.op.traits and not norms:
            x = writer.inputs[0]
            looked_up = x is not None and x.producer is not None and x.producer.op is ops.embedding
            cure = "; run fold-embedding-norm before" if looked_up else ""
            return f"%{value.name} is made by {writer.op.name}, a norm whose result is part of the residual{cure}"
        if writer.op not in WRITERS:
            return f"%{value.name} is made by {writer.op.name}"
        if why := find_computed_weight(writer):
            return why
    return None


def write_mapped(
    streams: Sequence[Stream],
    along: AxisMap,
    rows: Callable[[Value], Value] | None = None,
    heads: Collection[Node] = (),
) -> None:
    """Let every writer of `streams` write what `along` makes of its rows.

    With `rows`, a table that others than `heads` read besides stays as it is, and `rows` maps what is looked up; so it
    does what a norm without a weight makes.
    """
    writers = {w for stream in streams for w in stream.writers}
    known = {*writers, *heads}
    after = {w for w in writers if rows is not None and isinstance(w, Node) and not _own(w, known)}
    for stream in streams:
        for writer, value in stream.writers.items():
            if isinstance(writer, Param):
                _add_mapped(stream, writer, along)
            elif writer not in after:
                write_through(writer, along)
            elif rows is not None:
                with value.graph.inserting(after=writer):
                    mapped = rows(value)
                value.replace_uses(mapped, keep=backward_slice([mapped], [value]))


def _own(writer: Node, writers: Container[Node | Param]) -> bool:
    """Return whether only `writers` read the weight that a change of `writer` would affect."""
    if Trait.NORM in writer.op.traits:
        return writer.operand("weight") is not None
    table = writer.operand("table") if writer.op is ops.embedding else None
    return table is None or all(n in writers for n in table.users)


def _add_mapped(stream: Stream, param: Param, along: AxisMap) -> None:
    """Let the additions of the stream add what `along` makes of `param`."""
    rank = len(param.shape)
    new = derive(param, along(param.recipe, rank - 1, rank))
    for node, i in param.uses:
        if any(v in stream.values and i in carried(node, v) for v in node.outputs):
            node.set_input(i, new)
    replace_param(param, new)
