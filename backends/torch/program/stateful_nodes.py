"""Find the attentions and recurrences of a decoder that need a cache or state, and the nodes around them; and emit the
positions of the new tokens and of their keys, the first lines of a decoder's forward.
"""

from __future__ import annotations

from weft.ir import WeftError, ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import EMBEDDED, SOURCE, find_caches, find_states, find_tokens, has_cache
from weft.passes.analysis.tokens.scores import find_bias_nodes

from .emitter import Emitter
from .statements import TOP, Operand, Statement, Var


def find_cached_nodes(graph: Graph) -> set[Node]:
    """Return the causal self-attentions, lightning indexes and recurrences of a decoder that can generate with a cache.
    The set is empty if the graph has cache operands, reads no tokens, is neither a decoder nor an encoder-decoder, or
    if one of these nodes runs on a subset of the tokens (`find_subset_node`)."""
    return set() if find_subset_node(graph) is not None else set(_list_stateful_nodes(graph))


def _list_stateful_nodes(graph: Graph) -> list[Node]:
    """Return the nodes that need a cache or state to generate; [] if `graph` cannot generate, or has cache operands."""
    generates = graph.meta.get("kind") in ("decoder", "encoder-decoder") and find_tokens(graph) is not None
    return [n for n in graph.nodes if find_caches(n) or find_states(n)] if generates and not has_cache(graph) else []


def find_subset_node(graph: Graph) -> Node | None:
    """Return the first node that needs a cache or state but runs on a subset of the tokens, chosen from the sequence.
    Return None if there is no such node, or if the graph cannot generate with a cache for another reason."""
    seq = None if (tokens := find_tokens(graph)) is None else tokens.shape[1]
    nodes = ((n, n.inputs[0]) for n in _list_stateful_nodes(graph))
    return next((node for node, x in nodes if x is not None and x.shape[1] != seq), None)


def check_cache_writes(graph: Graph) -> None:
    """Check that every node with a cache or state runs on all tokens of the sequence.

    Raises:
        WeftError: naming the first node that runs on a subset of them.
    """
    node = find_subset_node(graph)
    if node is not None:
        raise WeftError(
            f"{graph.name} cannot generate: {node.op.name} (%{node.output.name}) runs on tokens chosen from the whole "
            "sequence, including later ones; use `weft.torch`, to train only"
        )


def find_key_bias_nodes(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the nodes that compute biases of the attentions in `cached`; their iotas count keys, not new tokens."""
    biases = [b for n in cached if n.op is ops.attention and (b := n.operand("bias")) is not None]
    return set(find_bias_nodes(graph, biases)) if biases else set()


def find_cross_attentions(graph: Graph, cached: set[Node]) -> set[Node]:
    """Return the cross-attentions of a decoder: only their queries depend on the decoder's inputs. `cached` are its
    nodes with a cache; if there are none, the result is empty."""
    if not cached:
        return set()
    inputs = {v for name, v in graph.inputs.items() if name in ("input_ids", EMBEDDED, "position_ids")}
    decoder_values = _find_dependents(graph, inputs)

    def crosses(node: Node) -> bool:
        if node.op is not ops.attention:
            return False
        q, k, v = node.inputs[:3]
        return v is not None and q in decoder_values and not decoder_values.intersection((k, v))

    return {n for n in graph.nodes if n not in cached and crosses(n)}


def _find_dependents(graph: Graph, values: set[Value]) -> set[Value]:
    """Return `values` and all values that depend on them."""
    dependent = set(values)
    for node in graph.nodes:
        if dependent.intersection(v for v in node.inputs if v is not None and not isinstance(v, Param)):
            dependent.update(node.outputs)
    return dependent


ARANGE = "torch.arange({1}, {1} + {2}.shape[1], device={2}.device)[None]"


def begin_forward(e: Emitter) -> None:
    """Emit the first statements of a forward that reads tokens; do nothing without tokens. They advance the cache if
    there are cached nodes, and make `position_ids` and the encoder's inputs optional."""
    tokens = find_tokens(e.graph)
    positions = e.graph.inputs.get("position_ids")
    if tokens is None:
        return
    if e.cached:
        cache = e.declare_input("cache", "None", "Cache | None")
        e.start = e.emit("0 if {0} is None else {0}.advance({1}.shape[1])", cache, tokens, name="start")
        e.advance = Statement("if {0} is not None: {0}.advance({1}.shape[1])", (cache, e[tokens]), (), TOP)
    sources = SOURCE if e.cross_attentions else ()
    for value in (v for name, v in e.graph.inputs.items() if name in sources or v is positions):
        operand = e[value]
        assert isinstance(operand, Var)
        operand.type, operand.default, operand.skips = "Tensor | None", "None", value is not positions
    if positions is not None:
        text, operands = _write_default_positions(e, e[positions])
        e[positions] = e.emit(text, *operands, name="position_ids", replaces=0)


def add_cache_advance(e: Emitter, statements: list[Statement]) -> list[Statement]:
    """Return `statements`, after one that advances the cache if none of them does; unchanged if there is no cache."""
    if e.start is None or e.advance is None or any(e.start in s.results for s in statements):
        return statements
    return [e.advance, *statements]


def emit_query_positions(e: Emitter) -> Operand:
    """Emit and return the positions of the new tokens, [batch or 1, seq]."""
    if (positions := e.graph.inputs.get("position_ids")) is not None:
        return e[positions]
    emit_first_position(e)  # before `position_ids` is reassigned: it reads the argument
    positions_in = e.declare_input("position_ids", "None", "Tensor | None")
    text, operands = _write_default_positions(e, positions_in)
    return e.hoist("position_ids", text, *operands, name="position_ids")


def emit_first_position(e: Emitter) -> Var | None:
    """Emit and return the position of the first new token, a variable that is None at run time if `position_ids` is
    passed. Return None (and emit nothing) without a cache, or if `position_ids` is a required input."""
    positions = e.declare_input("position_ids", "None", "Tensor | None")
    if e.start is None or not positions.default:
        return None
    return e.hoist("first", "{0} if {1} is None else None", e.start, positions, name="first")


def find_rolling_capacity(node: Node) -> tuple[int, int] | None:
    """Return (capacity, keep) of a windowed attention's rolling cache, which always keeps the `keep` first keys. Return
    None if the cache must keep all keys: there is no window, the bias is not computed from distances, or attentions
    with another window also read the bias."""
    window, keep = node.attrs.get("window"), node.attrs.get("keep_first", 0)
    if window is None:
        return None
    bias = node.operand("bias")
    return (window + keep, keep) if bias is None or _depends_on_distances(bias, window, keep) else None


def _depends_on_distances(bias: Value, window: int, keep: int) -> bool:
    """Return whether `bias` depends on distances, and all its readers are causal with `window` and `keep`."""
    maker = bias.producer
    keys = maker.operand("keys") if maker is not None and maker.op in (ops.alibi, ops.relative_position_bias) else None
    expected = {"window": window, "keep_first": keep, "causal": True}
    same = all(reader.attrs.get(k) == v for reader, _ in bias.uses for k, v in expected.items())
    return keys is not None and keys.producer is None and keys.name == "position_ids" and same


def emit_rolling_positions(e: Emitter, slots: int, keep: int) -> Var:
    """Emit and return the positions [batch or 1, keys] of the visible keys in a rolling cache of `slots` keys. `keep`
    of the slots keep the first keys of the sequence."""
    positions, cache = emit_query_positions(e), e.declare_input("cache", "None", "Cache | None")
    assert e.start is not None
    text = f"rolling_positions({{0}}, {{1}}, {{2}}, {slots}{f', {keep}' if keep else ''})"
    return e.hoist(("keys", slots, keep), text, positions, e.start, cache, name="near_positions")


def emit_written_positions(e: Emitter) -> Operand:
    """Emit and return the positions [batch or 1, seq] at which a rolling cache stores new tokens. If ``last`` is
    passed, tokens after that index of their row get position −1: they are not stored."""
    positions, last = emit_query_positions(e), e.declare_input("last", "None", "Tensor | None")
    text = "{0} if {1} is None else mask_padding({0}, {1})"
    return e.hoist("written", text, positions, last, name="kept_positions")


def emit_key_positions(e: Emitter) -> Var:
    """Emit and return the positions [batch or 1, keys] of the visible keys: the new tokens if the cache was empty
    before, else all tokens so far."""
    positions, cache = emit_query_positions(e), e.declare_input("cache", "None", "Cache | None")
    assert e.start is not None
    text = "{0} if {1} == 0 else torch.arange({2}.length, device={0}.device)[None]"
    return e.hoist("keys", text, positions, e.start, cache, name="key_positions")


def _write_default_positions(e: Emitter, positions: Operand) -> tuple[str, list[Value | Operand]]:
    """Return an expression (text, operands): `positions`, or if None at run time, those after the cached tokens."""
    tokens = find_tokens(e.graph)
    assert tokens is not None
    if e.start is None:
        arange = "torch.arange({1}.shape[1], device={1}.device)[None]"
        return f"{arange} if {{0}} is None else {{0}}", [positions, tokens]
    return f"{ARANGE} if {{0}} is None else {{0}}", [positions, e.start, tokens]
