"""Constant tables of a decode step: they do not depend on its inputs and are computed once, not for every token."""

from __future__ import annotations

from dataclasses import replace

from ..codegen.method_writer import write_attribute
from ..program.statements import TOP, Operand, ParamRef, Program, Statement, Submodule, Var

DEVICE = "next(module.parameters())"
TICKETS = Submodule("tickets", "Tickets")


def move_tables(program: Program, tickets: int) -> None:
    """Convert hoisted statements of `program` to attributes of the step, computed once, if they read only constants and
    the device of the tokens. The attribute ``tickets`` gets `tickets` counters per batch row, with
    which blocks of a kernel synchronize."""
    tokens = next(v for v in program.inputs if v.name == "input_ids")
    tables: dict[Operand, Submodule] = {TICKETS: replace(TICKETS, init=f"Tickets({tickets})")}
    readers: dict[Operand, set[str]] = {}
    for s in program.statements:
        for o in s.operands:
            readers.setdefault(o, set()).add(s.scope)
    remaining = []
    for s in program.statements:
        text = _write_module_expression(s, tokens, tables)
        if text is None or len(s.results) != 1 or s.results[0] in program.outputs.values():
            remaining.append(s)
            continue
        number = sum(leaf.path.startswith(f"{s.results[0].name}.table") for leaf in tables.values())
        init = text.replace("{", "{{").replace("}", "}}")  # an expression without placeholders
        table = Submodule(f"{s.results[0].name}.table{number or ''}", init)
        if readers.get(s.results[0], {TOP}) == {TOP}:
            tables[s.results[0]] = table
        else:  # inner classes get it as an argument
            remaining.append(replace(s, text="{0}", operands=(table,)))
    program.statements = [replace(s, operands=tuple(tables.get(o, o) for o in s.operands)) for s in remaining]


def _write_module_expression(s: Statement, tokens: Var, tables: dict[Operand, Submodule]) -> str | None:
    """Return `s` as an expression over the model ``module``; None if `s` reads other operands or is not hoisted."""
    if s.scope != TOP or not s.early or not s.operands:
        return None
    texts = []
    for i, o in enumerate(s.operands):
        if o in tables:
            texts.append(tables[o].init.format())
        elif isinstance(o, ParamRef) and o.constant:
            texts.append(write_attribute("module", o.path))
        elif o is tokens and s.text.count(f"{{{i}}}") == s.text.count(f"{{{i}}}.device"):
            texts.append(DEVICE)
        else:
            return None
    return s.text.format(*texts)
