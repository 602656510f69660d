"""The decode step of models of the zoo that have one (`make test`: a quarter of them), computed by torch, against the
module's single pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import MLA, Attention, LayerNorm, Mamba, RMSNorm, RoPE, module, named
from weft.backends.torch.decode.lower_step import TICKETS, find_refusal, move_tables
from weft.backends.torch.program.statements import ParamRef, Program, Statement, Submodule, Var
from weft.ir import Graph, Value, WeftError, interpret
from weft.ir.ops import add
from weft.passes.analysis.states import find_states

from ....e2e.random_models import strong
from ....lowered import build_module, build_step, write_step
from ....passes.zoo import TRIED
from ....passes.zoo_variants import attends, decoder
from ....sampling import each
from ..generated import COMPETES, accepts, assert_close, call, graph_of, module_of, rounded, tolerance

PROMPTS, STEPS = (5, 2), 7  # tokens of the rows before the steps; enough steps for windows to roll over
NARROW = (
    "grouped",
    "norms of q and k",
    "sandwich",
    "biases",
    "experts",
    "Mamba",
    "Mamba-2",
    "latent",
    "ALiBi",
    "window",
    "delta rule",
    "RWKV-7",
    "linear attention, rope",
)


@functools.cache
def reason(name: str) -> str | None:
    """Say why the model has no decode step to compare with a full pass."""
    graph = graph_of(name)
    compete = COMPETES.intersection(n.op.name for n in graph.nodes)
    return f"tokens compete: {', '.join(compete)}" if compete else find_refusal(graph)


def stepped(graph: Graph, module: Any, ids: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The logits [batch, STEPS, vocab] of single tokens behind prompts, read from `ids`; and how long the prompts are:
    of different lengths where that is possible."""
    step = build_step(graph, module)
    even = not accepts(module, "last") or any(find_states(n) for n in graph.nodes)
    lengths = PROMPTS[:1] * 2 if even else PROMPTS
    with torch.inference_mode():
        cache = module.new_cache(2, PROMPTS[0] + STEPS)
        given = {} if even else {"last": torch.tensor(lengths) - 1}
        call(module, {"input_ids": ids[:, : PROMPTS[0]], "cache": cache, **given})
        made = []
        for i in range(STEPS):
            at = torch.tensor(lengths)[:, None] + i
            made.append(step(ids.gather(1, at), at, cache))
    return torch.cat(made, 1), lengths


def tokens() -> Tensor:
    return torch.randint(1, 9, (2, PROMPTS[0] + STEPS), generator=torch.Generator().manual_seed(3))


def assert_steps(graph: Graph, module: Any) -> None:
    """Single tokens give what one pass gives."""
    (whole, *_) = call(module, {"input_ids": tokens()})
    got, lengths = stepped(graph, module, tokens())
    for row, length in enumerate(lengths):
        want = whole[row, length : length + STEPS].double().numpy()
        assert_close(got[row], want, tolerance(graph, torch.float32))


@pytest.mark.halved
@pytest.mark.parametrize("name", each(4, (n for n in TRIED if not n.startswith("cached/"))))
def test_decode_steps_agree_with_a_full_pass(name: str) -> None:
    if reason(name):
        return
    assert_steps(graph_of(name), module_of(name))


@pytest.mark.halved
@pytest.mark.parametrize("name", NARROW)
def test_decode_steps_in_bf16(name: str) -> None:
    """bf16 weights and caches stay near the interpreter that has the same weights."""
    name = f"variant/{name}"
    graph, ids = graph_of(name), tokens()
    module = build_module(graph, dtype=torch.bfloat16).eval()
    feeds = {"input_ids": ids.numpy(), "position_ids": torch.arange(ids.shape[1]).expand(2, -1).numpy()}
    exact = interpret(rounded(graph, module), {k: a for k, a in feeds.items() if k in graph.inputs})["logits"]
    got, lengths = stepped(graph, module, ids)
    assert got.dtype == torch.bfloat16
    for row, length in enumerate(lengths):
        assert_close(got[row], exact[row, length : length + STEPS], tolerance(graph, torch.bfloat16))


def test_most_decoders_of_the_zoo_have_a_decode_step() -> None:
    """So that the tests above do not pass by having nothing to do."""
    decoders = [n for n in TRIED if n.startswith(("variant/", "packed/")) and not reason(n)]
    assert len(decoders) > 60


def test_decode_steps_of_windows_with_first_keys() -> None:
    graph = strong(attends(window=3, keep_first=2).graph())
    assert "keep_first=2" in write_step(graph)[0]
    assert_steps(graph, build_module(graph).eval())


@pytest.mark.parametrize(("norm", "rope"), [(LayerNorm(), RoPE()), (RMSNorm(), RoPE(fraction=0.5))])
def test_latent_attention_without_a_kernel_for_its_queries(norm: Any, rope: RoPE) -> None:
    graph = strong(decoder(MLA(3, 9, 5, 8, 7, rope, norm=norm)).graph())
    text = write_step(graph)[0]
    assert "latent_decode(" in text and "latent_qk(" not in text
    assert_steps(graph, build_module(graph).eval())


@module
class Both:
    """The sum of two mixers."""

    first: Any
    second: Any

    def __call__(self, x: Value) -> Value:
        return add(named(self.first, "first")(x), named(self.second, "second")(x))


def test_caches_are_nested_as_in_the_model() -> None:
    """Two attentions that are computed with the norm around them would leave their module without its states; where
    that shows, they stay, and read what is normed."""
    alone, beside = (decoder(Both(Attention(3), Attention(3)), ffn) for ffn in (None, Mamba(21, 5)))
    for model, moves in ((alone, True), (beside, False)):
        graph = strong(model.graph())
        assert ("norm_qkv(" in write_step(graph)[0]) == moves
        assert_steps(graph, build_module(graph).eval())


@pytest.mark.parametrize(
    ("name", "why"),
    [("family/bert", "not a decoder"), ("family/bart", "not a decoder"), ("cached/preset gpt2", "no cache or state")],
)
def test_models_without_a_decode_step_give_a_reason(name: str, why: str) -> None:
    with pytest.raises(WeftError, match=f"^no decode step: .*{why}"):
        build_step(graph_of(name), module_of(name))


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
