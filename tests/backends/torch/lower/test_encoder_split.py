"""Statements that only the encoder needs move into the encoder."""

from __future__ import annotations

from weft.backends.torch.lower.encoder_split import move_into_encoder
from weft.backends.torch.program.statements import Program, Statement, Var


def program_of(*scopes: str) -> tuple[Program, list[Statement]]:
    """Return a program whose statements compute a mask of the encoder's input, then read it in `scopes`."""
    source, mask = Var("source", skips=True), Var("mask")
    statements = [Statement("{0} > 0", (source,), (mask,), "", early=True)]
    statements += [Statement("f({0}, {1})", (source, mask), (Var("y"),), scope) for scope in scopes]
    last = statements[-1].results[0]
    return Program("p", [source], {"y": last}, statements), statements


def test_statement_that_only_the_encoder_reads_moves() -> None:
    program, statements = program_of("encoder.layers.0", "encoder")
    moved = move_into_encoder(program, statements)
    assert [(s.scope, s.early) for s in moved] == [("encoder", False), ("encoder.layers.0", False), ("encoder", False)]
    assert [s.text for s in moved] == [s.text for s in statements]


def test_statement_that_others_read_stays() -> None:
    program, statements = program_of("encoder")
    mask = statements[0].results[0]
    statements.append(Statement("g({0})", (mask,), (Var("z"),), "decoder"))
    assert move_into_encoder(program, statements) == statements
    program.outputs["mask"] = mask
    assert move_into_encoder(program, statements[:2]) == statements[:2]


def test_nothing_moves_with_two_readers_or_none() -> None:
    for scopes in (("encoder", "decoder"), ()):
        program, statements = program_of(*scopes)
        assert move_into_encoder(program, statements) is statements
