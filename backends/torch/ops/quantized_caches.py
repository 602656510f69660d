"""Quantized KV caches: keys and values of an attention are rounded to codes of 8 or 4 bits."""

from __future__ import annotations

from weft.ir.graph import Node, Param

from ..program.emitter import Emitter
from ..program.statements import Operand, ParamRef, Var


def find_scales(e: Emitter, node: Node) -> list[Operand]:
    """Return the operands k_scale and v_scale that `node` has; parameters become weights of the program."""
    operands: list[Operand] = []
    for name in ("k_scale", "v_scale"):
        param = node.operand(name)
        if isinstance(param, Param):
            e.program.weights[param.name] = param
            shape = tuple(param.type.concrete({}))
            operands.append(ParamRef(param.name, shape, constant=True, dtype="torch.float32"))
        elif param is not None:
            operands.append(e[param])
    return operands


def emit_rounded_keys(e: Emitter, node: Node, k: Var, v: Var | None) -> tuple[Var, Var | None]:
    """Emit and return `k` and `v` of an attention without a cache, rounded as a cache would: to codes and back."""
    bits, factors = node.attrs["cache_bits"], find_scales(e, node)
    if v is None:
        return e.emit(f"update_quantized_keys(None, {{0}}, None, None, {{1}}, {bits})", k, *factors, name="k"), None
    text = f"update_quantized(None, {{0}}, {{1}}, None, None, {{2}}, {{3}}, {bits})"
    outputs = e.emit_tuple(text, k, v, *factors, names=("k", "v"))
    return outputs[0], outputs[1]
