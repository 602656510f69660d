"""Encoder-decoders: what only the encoder reads is made in it, for later calls of a text do not run it."""

from __future__ import annotations

from dataclasses import replace

from ..program.statements import TOP, Program, Statement, Var, inside


def within_encoder(program: Program, statements: list[Statement]) -> list[Statement]:
    """`statements`, those of the model's own forward moved into the encoder that are made of its inputs, and that
    nothing outside of it reads."""
    skipped = {v for v in program.inputs if v.skips}
    scopes = {s.scope.partition(".")[0] for s in statements if not skipped.isdisjoint(s.operands)} - {TOP}
    if len(scopes) != 1:
        return statements
    (encoder,) = scopes
    within = {s for s in statements if s.scope == encoder or inside(s.scope, encoder)}
    for s in statements:
        if (s.scope == TOP or s in within) and not skipped.isdisjoint(s.operands):
            skipped.update(s.results)
    read: set[object] = {*program.outputs.values()}  # outside of the encoder
    found = []
    for s in reversed(statements):
        if s.scope == TOP and s.results and skipped.issuperset(s.results) and read.isdisjoint(s.results):
            s = replace(s, scope=encoder, early=False)
        elif s not in within:
            read.update(o for o in s.operands if isinstance(o, Var))
        found.append(s)
    return found[::-1]
