"""Constant tables of a decode step become attributes, which are computed once."""

from __future__ import annotations

from weft.backends.torch.decode.step_constants import TICKETS, move_tables
from weft.backends.torch.program.statements import ParamRef, Program, Statement, Submodule, Var

IDS = Var("input_ids")


def build_program(*statements: Statement) -> Program:
    """Build a program of these statements; its output is the result of the last."""
    program = Program("model", inputs=[IDS])
    program.statements = [*statements]
    program.outputs = {"logits": statements[-1].results[0]}
    return program


def table(name: str, text: str, *operands: object) -> Statement:
    return Statement(text, operands, (Var(name),), "", early=True)


def test_statements_of_constants_become_expressions_of_the_module() -> None:
    slopes = ParamRef("attn.slopes", (4,), constant=True)
    angles = table("angles", "torch.arange(8, device={0}.device) * {1}", IDS, slopes)
    final = Statement("f({0}, {1})", (IDS, angles.results[0]), (Var("y"),), "")
    program = build_program(angles, final)
    move_tables(program, 0)
    (statement,) = program.statements
    _, attribute = statement.operands
    assert isinstance(attribute, Submodule)
    assert attribute.path == "angles.table"
    device = "next(module.parameters()).device"
    assert attribute.init.format() == f"torch.arange(8, device={device}) * module.attn.slopes"


def test_statements_that_read_tokens_stay() -> None:
    shape = table("n", "torch.arange({0}.shape[1], device={0}.device)", IDS)
    final = Statement("f({0})", (shape.results[0],), (Var("y"),), "")
    program = build_program(shape, final)
    move_tables(program, 0)
    assert [(s.text, s.operands) for s in program.statements] == [(s.text, s.operands) for s in (shape, final)]


def test_weights_that_change_in_training_stay() -> None:
    scaled = table("scaled", "{0} * 2", ParamRef("attn.weight", (4,)))
    final = Statement("f({0})", (scaled.results[0],), (Var("y"),), "")
    program = build_program(scaled, final)
    move_tables(program, 0)
    assert program.statements[0].text == "{0} * 2"


def test_inner_classes_get_a_table_as_an_argument() -> None:
    angles = table("angles", "torch.arange(8, device={0}.device)", IDS)
    inner = Statement("f({0})", (angles.results[0],), (Var("y"),), "layers.0")
    program = build_program(angles, inner)
    move_tables(program, 0)
    first, second = program.statements
    assert first.text == "{0}" and isinstance(first.operands[0], Submodule)
    assert second.operands == (first.results[0],)


def test_ticket_counters_are_an_attribute_of_the_largest_number() -> None:
    final = Statement("f({0})", (TICKETS,), (Var("y"),), "")
    program = build_program(final)
    move_tables(program, 12)
    (counters,) = program.statements[0].operands
    assert isinstance(counters, Submodule) and counters.init == "Tickets(12)"
