"""Caches of codes: the scales of attentions whose graph says that keys and values are rounded."""

from __future__ import annotations

from weft.ir.graph import Node, Param

from ..program.emitter import Emitter
from ..program.statements import Operand, ParamRef, Var


def held_as(node: Node) -> tuple[str, int]:
    """The dtype of the cache of `node` as torch spells it, and how many codes one number of it holds."""
    return ("torch.int8", 1) if node.attrs["cache_bits"] == 8 else ("torch.uint8", 2)


def scales(e: Emitter, node: Node) -> list[Operand]:
    """The scales of keys and, where they are apart, of values."""
    found: list[Operand] = []
    for name in ("k_scale", "v_scale"):
        param = node.operand(name)
        if isinstance(param, Param):
            e.program.weights[param.name] = param
            shape = tuple(param.type.concrete({}))
            found.append(ParamRef(param.name, shape, constant=True, dtype="torch.float32"))
        elif param is not None:
            found.append(e[param])
    return found


def rounded(e: Emitter, node: Node, k: Var, v: Var | None) -> tuple[Var, Var | None]:
    """Keys and values of an attention without a cache as their codes say."""
    bits, factors = node.attrs["cache_bits"], scales(e, node)
    if v is None:
        return e.emit(f"key_through_codes(None, {{0}}, None, None, {{1}}, {bits})", k, *factors, name="k"), None
    text = f"through_codes(None, {{0}}, {{1}}, None, None, {{2}}, {{3}}, {bits})"
    made = e.many(text, k, v, *factors, names=("k", "v"))
    return made[0], made[1]
