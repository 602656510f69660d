"""The residual stream: the values that residual additions connect, what writes into them and what reads them.

Scaling, centring or rotating the whole stream is one linear map of its rows: every writer makes mapped rows, every
reader undoes the map, and what only adds, moves or weighs rows in between need not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.ir import Graph, Node, Param, Value, WeftError

from .absorb import NORMS, moves_rows

READING_NORMS = (*NORMS, "norm_linear")


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
        if node.op.name in ("add", "add_norm") and node.outputs[-1] not in seen and _residual(node):
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
    name = reader.op.name
    if name == "add_norm" or (name in READING_NORMS and index == 0):
        stream.norms[reader] = None
    elif name == "linear" and index == 0:
        stream.linears[reader] = None
    elif not carries:
        stream.obstacles.append(f"%{value.name} is read by {name} (%{reader.output.name})")


def carried(node: Node, output: Value) -> tuple[int, ...]:
    """The operands whose rows `node` adds, moves or weighs to make `output`; none if it does more with them."""
    width = output.shape[-1:]
    wide = tuple(i for i, v in enumerate(node.inputs) if v is not None and v.shape[-1:] == width)
    match node.op.name:
        case "add" | "sub":
            return wide if len(wide) == 2 else ()
        case "add_norm":
            return (0, 1) if output.index == 1 else ()
        case "affine":
            return (0,) if node.attrs["plus"] == 0 else ()
        case "mul":  # by a number for every row
            other = node.inputs[1 - wide[0]] if len(wide) == 1 else None
            return wide if other is not None and other.shape[-1:] in ((), (1,)) else ()
        case "concat":
            return wide if moves_rows(node) else ()
    return (0,) if moves_rows(node) and not isinstance(node.inputs[0], Param) else ()


def tables(stream: Stream) -> Iterator[tuple[Node, Param]]:
    """The lookups that write into the stream, with their tables."""
    for writer in stream.writers:
        table = writer.operand("table") if isinstance(writer, Node) and writer.op.name == "embedding" else None
        if isinstance(writer, Node) and isinstance(table, Param):
            yield writer, table
