"""Where a call begins and which keys it sees: the first lines of the forward of a model that generates."""

from __future__ import annotations

from .program import Emitter, Operand, Statement, Var

ARANGE = "torch.arange({1}, {1} + {2}.shape[1], device={2}.device)[None]"


def begin(e: Emitter) -> None:
    """Make `position_ids` optional, and count the tokens of the call where the model is given a cache."""
    tokens = e.graph.inputs.get("input_ids")
    positions = e.graph.inputs.get("position_ids")
    if tokens is None:
        return
    if e.cached:
        cache = e.give("cache", "None", "Cache | None")
        e.start = e.emit("0 if {0} is None else {0}.advance({1}.shape[1])", cache, tokens, name="start")
    if positions is not None:
        given = e[positions]
        assert isinstance(given, Var)
        given.type, given.default = "Tensor | None", "None"
        e[positions] = _filled(e, given)


def end(e: Emitter, statements: list[Statement]) -> list[Statement]:
    """`statements`, the tokens counted also where nothing asks how many there were."""
    start = e.start
    if start is None or any(start in s.results for s in statements):
        return statements
    cache, tokens = e.give("cache", "None", "Cache | None"), e[e.graph.inputs["input_ids"]]
    text = "if {0} is not None: {0}.advance({1}.shape[1])"
    return [Statement(text, (cache, tokens), (), ""), *statements]


def query_positions(e: Emitter) -> Operand:
    """The positions of the tokens of a call, [batch or 1, seq]."""
    if (positions := e.graph.inputs.get("position_ids")) is not None:
        return e[positions]
    given = e.give("position_ids", "None", "Tensor | None")
    return e.hoist("position_ids", "{0}", _filled(e, given), name="position_ids")


def key_positions(e: Emitter) -> Var:
    """The positions of the keys that a query may see, [batch or 1, keys]: those of the call, or all in the cache."""
    positions, cache = query_positions(e), e.give("cache", "None", "Cache | None")
    assert e.start is not None
    text = "{0} if {1} == 0 else torch.arange({2}.length, device={0}.device)[None]"
    return e.hoist("keys", text, positions, e.start, cache, name="key_positions")


def _filled(e: Emitter, given: Var) -> Var:
    """`given`, or where it is None the positions that follow what the cache holds."""
    tokens = e.graph.inputs["input_ids"]
    text = f"{ARANGE} if {{0}} is None else {{0}}"
    if e.start is None:
        text = text.replace("{1}, {1} + {2}.shape[1]", "{2}.shape[1]")
        return e.emit(text.replace("{2}", "{1}"), given, tokens, name="position_ids", replaces=0)
    return e.emit(text, given, e.start, tokens, name="position_ids", replaces=0)
