"""Move statements that only the encoder needs into the encoder: forward passes on later tokens do not run it."""

from __future__ import annotations

from dataclasses import replace

from ..program.statements import TOP, Program, Statement, Var, is_inside


def move_into_encoder(program: Program, statements: list[Statement]) -> list[Statement]:
    """Return `statements` in order. Statements that depend on the encoder's inputs, and whose results only the encoder
    reads, are moved into its scope. Nothing changes unless exactly one top-level module reads the encoder's inputs."""
    skipped = {v for v in program.inputs if v.skips}
    scopes = {s.scope.partition(".")[0] for s in statements if not skipped.isdisjoint(s.operands)} - {TOP}
    if len(scopes) != 1:
        return statements
    (encoder,) = scopes
    within = {s for s in statements if s.scope == encoder or is_inside(s.scope, encoder)}
    for s in statements:
        if (s.scope == TOP or s in within) and not skipped.isdisjoint(s.operands):
            skipped.update(s.results)
    read: set[object] = {*program.outputs.values()}  # by statements outside of the encoder
    moved = []
    for s in reversed(statements):
        if s.scope == TOP and s.results and skipped.issuperset(s.results) and read.isdisjoint(s.results):
            s = replace(s, scope=encoder, early=False)
        elif s not in within:
            read.update(o for o in s.operands if isinstance(o, Var))
        moved.append(s)
    return moved[::-1]
