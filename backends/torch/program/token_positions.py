"""Positions of the new tokens and of their keys: the first lines of a decoder's forward."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import SOURCE, find_tokens

from .emitter import Emitter
from .statements import TOP, Operand, Statement, Var

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
    """Return whether `bias` is computed from distances to `position_ids`, and each of its readers is causal with the
    given `window` and `keep_first` = `keep`."""
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
