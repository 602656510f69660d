"""The emitter of decode steps: weights as operands, norms, scopes of statements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.decode.step_emitter import STEPS, StepEmitter, step_lowering
from weft.backends.torch.program.statements import ParamRef, Submodule
from weft.ir import OPS, Graph, Node, Param, TensorType, WeftError, dtypes, ops
from weft.ir.op import Trait
from weft.ir.recipes import Normal
from weft.ir.types import sizes

from .fused_ops import CASES, FUSED, cases_of

SHAPE = sizes.sym("batch"), sizes.sym("seq")


def build_graph(*weights: str, scope: str = "layers.0.attn") -> tuple[StepEmitter, dict[str, Param], Node]:
    """Build the emitter of a graph with weights [4, 4] at these paths, and enter its only node, in `scope`."""
    graph = Graph("step")
    graph.meta["kind"] = "decoder"
    for name in ("input_ids", "position_ids"):
        graph.add_input(name, TensorType(dtypes.i64, SHAPE))
    x = graph.add_input("x", TensorType(dtypes.f32, (*SHAPE, 4)))
    params: dict[str, Any] = {
        name: graph.add_param(name, TensorType(dtypes.f32, (4, 4)), Normal((4, 4), 1.0, name)) for name in weights
    }
    with graph.scope(scope):
        node = ops.exp(x).producer
    assert node is not None
    emitter = StepEmitter(graph, {})
    emitter.enter(node)
    return emitter, params, node


def test_a_parameter_is_a_reference_and_a_weight_of_the_program() -> None:
    emitter, params, _ = build_graph("layers.0.attn.q.weight")
    assert emitter.get_weight(None) is None
    assert emitter.get_weight(params["layers.0.attn.q.weight"]) == ParamRef("layers.0.attn.q.weight", (4, 4))
    assert [*emitter.program.weights] == ["layers.0.attn.q.weight"]


def test_weights_of_sibling_modules_are_packed() -> None:
    emitter, params, _ = build_graph(*(f"layers.0.attn.{n}.weight" for n in "qkv"))
    assert emitter.pack_params([*params.values()]) == Submodule("layers.0.attn.qkv_weight", "pack({0}.q, {0}.k, {0}.v)")
    first = next(iter(params.values()))
    assert emitter.pack_params([first, first]) == emitter.get_weight(first)


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (("mlp.gate.weight", "mlp.up.weight"), Submodule("mlp.gate_up_weight", "pack({0}.gate, {0}.up)")),
        (("rnn.i.bias", "rnn.f.bias"), Submodule("rnn.if__bias", "pack_bias({0}.i, {0}.f)")),  # `if` is a keyword
        (("mlp.gate.weight", "attn.up.weight"), None),
        (("mlp.gate.scale", "mlp.up.scale"), None),
        (("gate", "up"), None),
    ],
)
def test_only_weights_or_biases_of_siblings_can_be_packed(paths: tuple[str, ...], wanted: Submodule | None) -> None:
    emitter, params, _ = build_graph(*paths)
    assert emitter.pack_params([*params.values()]) == wanted


def test_norms_are_named_by_their_weight_or_numbered() -> None:
    emitter, params, _ = build_graph("layers.0.norm.weight")
    gain = params["layers.0.norm.weight"]
    assert emitter.make_norm("rms", 1e-5, gain) == Submodule("layers.0.norm.norm", 'Norm("rms", {0}.weight, eps=1e-05)')
    plain = [emitter.make_norm("rms", eps).path for eps in (1e-5, 1e-6, 1e-5)]
    assert plain == [f"layers.0.attn.norm_rms{n}.norm" for n in ("", "_2", "")]


def test_tickets_are_as_many_as_the_largest_kernel_needs() -> None:
    emitter, _, _ = build_graph()
    assert emitter.emit_tickets(3) is emitter.emit_tickets(2)
    assert emitter.most_tickets == 3


def test_kernels_and_fallbacks_are_recorded_for_the_current_node() -> None:
    emitter, _, node = build_graph()
    emitter.record_kernel("norm_linear", lambda dtype: "no" if dtype == torch.float64 else None)
    emitter.record_fallback("it has a key mask")
    kernel, fallback = emitter.choices
    assert (kernel.node, kernel.kernel, [f(torch.float64) for f in kernel.refusals]) == (node, "norm_linear", ["no"])
    assert (fallback.node, fallback.kernel, fallback.reason) == (node, "", "it has a key mask")


def test_scope_of_weights_is_their_innermost_common_module() -> None:
    emitter, _, _ = build_graph()
    weight = ParamRef("layers.0.attn.q.weight", (4, 4))
    norm = Submodule("layers.0.attn_norm.norm", "Norm()")
    assert emitter.find_scope(weight) == "layers.0.attn"
    assert emitter.find_scope(weight, norm) == "layers.0"
    assert emitter.find_scope(ParamRef("layers.1.attn.q.weight", (4, 4))) == ""  # a ModuleList has no forward


def test_every_fused_op_has_a_lowering() -> None:
    assert {op for op in OPS.values() if Trait.FUSED in op.traits} == {*FUSED}


def test_cases_of_all_modules_are_tested() -> None:
    """Each of these modules has a file of tests with the cases of its ops."""
    modules = ("beginning", "step_attention", "step_experts", "step_linear", "step_recurrences")
    assert sorted(n for module in modules for n in cases_of(module)) == sorted(CASES)


def test_a_lowering_refuses_nothing_unless_it_says_so() -> None:
    assert STEPS["rotary_angles"].when(None, None) is None


def test_a_second_lowering_of_an_op_is_refused() -> None:
    before = STEPS["norm_glu"]
    with pytest.raises(WeftError, match="norm_glu"):
        step_lowering(ops.norm_glu)(lambda e, node: None)
    assert STEPS["norm_glu"] is before
