"""Tables of a decode step that depend on nothing it is given, and so are made once, not at every token."""

from __future__ import annotations

from dataclasses import replace

from ..program.statements import TOP, Operand, ParamRef, Program, Statement, Submodule, Var
from .members import reached

DEVICE = "next(module.parameters())"
TICKETS = Submodule("tickets", "Tickets")


def made_once(program: Program, tickets: int) -> None:
    """Statements at the top that read nothing but the device of a token become what the step holds; so do counters,
    `tickets` for each row."""
    tokens = next(v for v in program.inputs if v.name == "input_ids")
    found: dict[Operand, Submodule] = {TICKETS: replace(TICKETS, init=f"Tickets({tickets})")}
    readers: dict[Operand, set[str]] = {}
    for s in program.statements:
        for o in s.operands:
            readers.setdefault(o, set()).add(s.scope)
    kept = []
    for s in program.statements:
        text = _text(s, tokens, found)
        if text is None or len(s.results) != 1 or s.results[0] in program.outputs.values():
            kept.append(s)
            continue
        taken = sum(leaf.path.startswith(f"{s.results[0].name}.table") for leaf in found.values())
        init = text.replace("{", "{{").replace("}", "}}")  # which has no places
        held = Submodule(f"{s.results[0].name}.table{taken or ''}", init)
        if readers.get(s.results[0], {TOP}) == {TOP}:
            found[s.results[0]] = held
        else:  # what inner classes read is handed to them in the call
            kept.append(replace(s, text="{0}", operands=(held,)))
    program.statements = [replace(s, operands=tuple(found.get(o, o) for o in s.operands)) for s in kept]


def _text(s: Statement, tokens: Var, found: dict[Operand, Submodule]) -> str | None:
    """The expression of `s` over the module alone; None if it has to do with more."""
    if s.scope != TOP or not s.early or not s.operands:
        return None
    texts = []
    for i, o in enumerate(s.operands):
        if o in found:
            texts.append(found[o].init.format())
        elif isinstance(o, ParamRef) and o.constant:
            texts.append(reached(o.path))
        elif o is tokens and s.text.count(f"{{{i}}}") == s.text.count(f"{{{i}}}.device"):
            texts.append(DEVICE)
        else:
            return None
    return s.text.format(*texts)
