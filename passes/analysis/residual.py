"""The residual stream: the values that residual additions connect, the nodes that write into it and that read it.

A row is the feature vector of one token. Scaling, centring or rotating a stream is one linear map of its rows: every
writer writes mapped rows, every reader inverts the map; nodes that only add, move or scale rows stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait

from ..edits.absorb import OUTPUT_WEIGHTS, AxisMap, absorb_output_map, find_computed_weight, is_row_move
from ..edits.edit import backward_slice, derive_param, replace_param
from .layers import LAYER


@dataclass
class ResidualStream:
    """One residual stream, whose rows have `width` features.

    values: all values of the stream, an ordered set.
    writers: the nodes that write rows into it, and the parameters added to it, each with the value it writes.
    norms, linears: the nodes that read it as their first operand (an add_norm also as its second), ordered sets.
    obstacles: a sentence for each graph input, graph output or further reader that prevents a map of the stream.
    """

    width: int
    values: dict[Value, None] = field(default_factory=dict)
    writers: dict[Node | Param, Value] = field(default_factory=dict)
    norms: dict[Node, None] = field(default_factory=dict)
    linears: dict[Node, None] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)


def find_streams(graph: Graph) -> list[ResidualStream]:
    """Return the residual streams of `graph` that a norm reads, in the order of their first additions.

    A pre-norm decoder has one, a post-norm model several (each norm starts a new stream), and an encoder-decoder at
    least two.
    """
    all_streams: list[ResidualStream] = []
    seen: set[Value] = set()
    for node in graph.nodes:
        if node.op in (ops.add, ops.add_norm) and node.outputs[-1] not in seen and _is_residual(node):
            stream = _trace_stream(node.outputs[-1])
            seen.update(stream.values)
            if stream.norms:
                all_streams.append(stream)
    return all_streams


def require_streams(graph: Graph, rule: str) -> list[ResidualStream]:
    """Return `find_streams(graph)`, a list that is not empty.

    Raises:
        WeftError: naming the pass `rule`, if `graph` has no residual stream.
    """
    all_streams = find_streams(graph)
    if not all_streams:
        raise WeftError(f"{rule}: graph {graph.name} has no residual stream: no norm reads a sum of two values")
    return all_streams


def find_layers_without_residual(graph: Graph) -> list[str]:
    """Return the scopes of layers whose output contains their input only through weights or a mixer of tokens.
    A layer whose output is added to another value outside of all layers has a residual connection."""
    layers: dict[str, set[Node]] = {}
    for node in graph.nodes:
        if match := LAYER.match(node.scope):
            layers.setdefault(match[0].removesuffix("."), set()).add(node)
    return [scope for scope, nodes in layers.items() if not _has_residual(nodes)]


def _has_residual(layer: set[Node]) -> bool:
    computed = {v for n in layer for v in n.outputs}
    entries = {v for n in layer for v in n.inputs if v is not None and v not in computed and _is_state(v)}
    exits = [v for v in computed if _is_state(v) and (v.is_output or any(user not in layer for user in v.users))]
    waiting = [v for v in exits if any(v.shape[-1] == entry.shape[-1] for entry in entries)]
    adders = {user for v in waiting for user in v.users if user.op in (ops.add, ops.add_norm)}
    if not waiting or any(not LAYER.match(user.scope) for user in adders):
        return True
    seen = set(waiting)
    for value in waiting:  # grows during the walk
        if value in entries:
            return True
        if value in computed and value.producer is not None and not _mixes(value.producer):
            waiting += {v for v in value.producer.inputs if v is not None} - seen
            seen.update(waiting)
    return False


def _is_state(value: Value) -> bool:
    return not isinstance(value, Param) and value.type.dtype.is_float and len(value.shape) > 1


def _mixes(node: Node) -> bool:
    """Return whether `node` multiplies by weights or mixes tokens: its result no longer contains its operand."""
    traits = node.op.traits
    if traits & {Trait.ATTENTION, Trait.RECURRENT, Trait.COMPARES}:
        return True
    keeps = traits & {Trait.ELEMENTWISE, Trait.VIEW, Trait.COPY, Trait.NORM} and Trait.FUSED not in traits
    return not keeps and any(isinstance(v, Param) for v in node.inputs)


def find_tables(streams: Sequence[ResidualStream]) -> Iterator[Value]:
    """Yield the table of each `embedding` node that writes into one of `streams`; a shared table once per node."""
    for stream in streams:
        for writer in stream.writers:
            table = writer.operand("table") if isinstance(writer, Node) and writer.op is ops.embedding else None
            if table is not None:
                yield table


def check_streams(
    streams: Sequence[ResidualStream], rule: str, obstacle: Callable[[ResidualStream], str | None]
) -> None:
    """Check that all `streams` can be mapped: `obstacle(stream)` returns None, and `stream.obstacles` is empty.

    Raises:
        WeftError: naming the pass `rule` and the first obstacle.
    """
    for stream in streams:
        if why := obstacle(stream) or next(iter(stream.obstacles), None):
            raise WeftError(f"{rule}: the residual stream cannot be changed: {why}")


def _is_residual(node: Node) -> bool:
    x, y = node.inputs[:2]
    if x is None or y is None or isinstance(x, Param) or isinstance(y, Param) or x.type != y.type:
        return False
    return x.type.dtype.is_float and len(x.shape) > 1 and isinstance(x.shape[-1], int)


def _trace_stream(start: Value) -> ResidualStream:
    stream = ResidualStream(start.width, {start: None})
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
            continue  # its other readers do not belong to this stream
        if node is None:
            stream.obstacles.append(f"%{value.name} is an input of the graph")
        elif operands := find_stream_operands(node, value):
            visit(*(node.inputs[i] for i in operands), *(v for v in node.outputs if find_stream_operands(node, v)))
        else:
            stream.writers[node] = value
        if value.is_output:
            stream.obstacles.append(f"%{value.name} is an output of the graph")
        for reader, i in value.uses:
            outputs = [v for v in reader.outputs if i in find_stream_operands(reader, v)]
            visit(*outputs)
            for out in outputs:
                visit(*(reader.inputs[j] for j in find_stream_operands(reader, out)))
            _add_reader(stream, value, reader, i, bool(outputs))
    return stream


def _add_reader(stream: ResidualStream, value: Value, reader: Node, index: int, carries: bool) -> None:
    """Add `reader`, whose operand `index` is `value`, to the norms, linears or obstacles of `stream`.
    Other readers are obstacles unless the stream continues in their outputs (`carries`)."""
    if reader.op is ops.add_norm or ((Trait.NORM in reader.op.traits or reader.op is ops.norm_linear) and index == 0):
        stream.norms[reader] = None
    elif reader.op is ops.linear and index == 0:
        stream.linears[reader] = None
    elif not carries:
        stream.obstacles.append(f"%{value.name} is read by {reader.op.name} (%{reader.output.name})")


def find_stream_operands(node: Node, output: Value) -> tuple[int, ...]:
    """Return the indices of the operands whose rows `node` only adds, moves or scales to compute `output`.

    Return () if it does more, such as adding a constant.
    """
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
        case ops.mul:  # by a number per row
            factor = node.inputs[1 - wide[0]] if len(wide) == 1 else None
            return wide if factor is not None and factor.shape[-1:] in ((), (1,)) else ()
        case ops.concat:
            return wide if is_row_move(node) else ()
    return (0,) if is_row_move(node) and not isinstance(node.inputs[0], Param) else ()


def explain_unmappable(stream: ResidualStream, norms: bool = False) -> str | None:
    """Return why a linear map of `stream` cannot be absorbed by its writers, naming the first that prevents it.

    Return None if all can absorb it. Added parameters always can; norms that write to the stream can if `norms` is
    true.
    """
    for writer, value in stream.writers.items():
        if isinstance(writer, Param):
            continue
        if Trait.NORM in writer.op.traits and not norms:
            x = writer.inputs[0]
            looked_up = x is not None and x.producer is not None and x.producer.op is ops.embedding
            cure = "; run fold-embedding-norm before" if looked_up else ""
            return f"%{value.name} is made by {writer.op.name}, a norm whose result is part of the residual{cure}"
        if writer.op not in OUTPUT_WEIGHTS:
            return f"%{value.name} is made by {writer.op.name}"
        if why := find_computed_weight(writer):
            return why
    return None


def map_writers(
    streams: Sequence[ResidualStream],
    along: AxisMap,
    rows: Callable[[Value], Value] | None = None,
    heads: Collection[Node] = (),
) -> None:
    """Absorb the map `along` into the weights of every writer of `streams`, in place.

    If `rows` is given, norms without a weight stay unchanged, and so do embeddings whose table is also read by nodes
    other than writers and `heads` (linears). `rows(value)` then emits nodes after them that map `value`.
    """
    writers = {w for stream in streams for w in stream.writers}
    readers = {*writers, *heads}
    mapped_after = {w for w in writers if rows is not None and isinstance(w, Node) and not _has_own_weight(w, readers)}
    for stream in streams:
        for writer, value in stream.writers.items():
            if isinstance(writer, Param):
                _map_added_param(stream, writer, along)
            elif writer not in mapped_after:
                absorb_output_map(writer, along)
            elif rows is not None:
                with value.graph.inserting(after=writer):
                    mapped = rows(value)
                value.replace_uses(mapped, keep=backward_slice([mapped], [value]))


def _has_own_weight(writer: Node, writers: Container[Node | Param]) -> bool:
    """Return whether `writer` can absorb a map: a norm with a weight, an embedding if only `writers` read its table."""
    if Trait.NORM in writer.op.traits:
        return writer.operand("weight") is not None
    table = writer.operand("table") if writer.op is ops.embedding else None
    return table is None or all(n in writers for n in table.users)


def _map_added_param(stream: ResidualStream, param: Param, along: AxisMap) -> None:
    """Replace `param` by its map `along` in the additions of `stream`; other readers keep the old `param`."""
    rank = len(param.shape)
    new = derive_param(param, along(param.recipe, rank - 1, rank))
    for node, i in param.uses:
        if any(v in stream.values and i in find_stream_operands(node, v) for v in node.outputs):
            node.set_input(i, new)
    replace_param(param, new)
