"""Every op record is complete and agrees with itself on its own cases."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import OPS, Graph, Op, Value, interpret, ops, verify
from weft.ir.op import Case, Growth, OpCall, Trait
from weft.ir.testing import build_node_graph, expand_bodies
from weft.ir.text.parser import parse
from weft.ir.types import TensorType, dtypes, sizes

from .fused.test_norm_linear import ORACLES as NORM_LINEAR
from .test_activation import ORACLES as ACTIVATION
from .test_elementwise import ORACLES as ELEMENTWISE
from .test_latent import ORACLES as LATENT
from .test_norm import ORACLES as NORM
from .test_products import ORACLES as PRODUCTS
from .test_reduce import ORACLES as REDUCE
from .test_signals import ORACLES as SIGNALS
from .test_tensor import ORACLES as TENSOR

assert ops  # importing the package fills the registry
CASES = [pytest.param(op, case, id=f"{op.name}-{i}") for op in OPS.values() for i, case in enumerate(op.cases)]
WITH_BODY = [p for p in CASES if p.values[0].has_body]
# The vocabulary that bodies end in, which every backend must know; everything else has a body.
PRIMITIVES = {
    *("add", "sub", "mul", "div", "pow", "minimum", "maximum", "floordiv", "mod", "less", "less_equal", "equal"),
    *("logical_and", "logical_or", "logical_not", "neg", "abs", "square", "exp", "log", "sqrt", "rsqrt", "reciprocal"),
    *("sin", "cos", "tanh", "floor", "ceil", "round", "erf", "sigmoid", "softplus", "relu", "cast", "clip", "affine"),
    "where",
    *("sum", "mean", "max", "min", "prod", "softmax", "cumsum", "top_k", "matmul", "embedding", "reshape", "transpose"),
    *(
        "squeeze",
        "unsqueeze",
        "expand",
        "concat",
        "split",
        "slice",
        "gather",
        "gather_rows",
        "scatter_rows",
        "iota",
    ),
    *("one_hot", "pad", "scan"),  # the step of a scan is data: nothing simpler repeats it
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_record_is_complete(name: str) -> None:
    op = OPS[name]
    assert op.cases, "an op without cases is not tested by anybody"
    assert op.doc
    assert op.operands
    assert getattr(ops, name) is op


def test_op_call_has_operands_and_attributes_by_name() -> None:
    one, two = TensorType(dtypes.f32, (1,)), TensorType(dtypes.f32, (2,))
    norm = OpCall(OPS["layer_norm"], [one, None, two], {"eps": 0.5})
    assert (norm.x, norm.weight, norm.bias, norm.eps) == (one, None, two, 0.5)
    assert OpCall(OPS["rms_norm"], [one], {}).weight is None
    assert OpCall(OPS["concat"], [one, two, one], {"axis": 0}).xs == (one, two, one)
    with pytest.raises(AttributeError, match="'epsilon', only x, weight, bias, eps"):
        _ = norm.epsilon


def test_body_or_primitive() -> None:
    assert {name for name, op in OPS.items() if not op.has_body} == PRIMITIVES


@pytest.mark.parametrize("name", sorted(set(OPS) - PRIMITIVES))
def test_bodies_end_in_primitives(name: str) -> None:
    for case in OPS[name].cases:
        graph = expand_bodies(build_node_graph(OPS[name], case)[0])
        for _ in range(5):
            graph = expand_bodies(graph)
        assert {node.op.name for node in graph.nodes} <= PRIMITIVES


@pytest.mark.parametrize(("op", "case"), CASES)
def test_inferred_types_are_those_of_the_reference(op: Op, case: Case) -> None:
    graph, feeds = build_node_graph(op, case)
    verify(graph)
    for name, array in interpret(graph, feeds).items():
        type = graph.outputs[name].type
        assert array.shape == type.shape
        assert array.dtype.kind == {"float": "f", "int": "i", "bool": "b"}[type.dtype.kind]
        assert np.isfinite(array[array != -np.inf]).all()  # −∞ hides a key


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cost_is_a_number(op: Op, case: Case) -> None:
    graph, _ = build_node_graph(op, case)
    (node,) = graph.nodes
    cost = op.node_cost(node)
    assert all(isinstance(n, int) and n >= 0 for n in (cost.flops, cost.read, cost.written))


@pytest.mark.parametrize(("op", "case"), CASES)
def test_states_match_past_operands_and_present_outputs(op: Op, case: Case) -> None:
    """Of every op: whatever it declares to keep, and nothing else, is called past and present."""
    (node,) = build_node_graph(op, case)[0].nodes
    specs = op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)
    assert len({spec.part for spec in specs}) == len(specs)
    names = op.operand_names(node.inputs, node.attrs)
    pasts = {name for name in names if name.startswith("past") and node.operand(name) is not None}
    assert pasts <= {spec.past_operand for spec in specs}
    results = dict(zip(op.result_names(node.inputs, node.attrs), node.outputs, strict=False))
    for spec in specs:
        past = node.operand(spec.past_operand)
        if spec.present_output and past is not None:
            new = node.required_operand("k").shape[1] if spec.growth is Growth.APPEND else 0
            present = past.type if spec.slots is None else past.type.with_axis(spec.slots, past.shape[spec.slots] + new)
            assert (past.type.shape, results[spec.present_output].shape) == (spec.type.shape, present.shape)
        elif spec.present_output:
            assert spec.present_output not in results and spec.row_shape.count(sizes.sym("capacity")) == (
                spec.slots is not None
            )


@pytest.mark.parametrize(("op", "case"), CASES)
def test_one_node_graph_round_trips(op: Op, case: Case) -> None:
    graph, _ = build_node_graph(op, case)
    assert parse(str(graph)) == graph


@pytest.mark.halved
@pytest.mark.parametrize(("op", "case"), WITH_BODY)
def test_body_is_the_reference(op: Op, case: Case) -> None:
    for seed in range(2):
        graph, feeds = build_node_graph(op, case, seed)
        body = expand_bodies(graph)
        verify(body)
        assert parse(str(body)) == body
        wanted, found = interpret(graph, feeds), interpret(body, feeds)
        for name, array in wanted.items():
            assert body.outputs[name].type == graph.outputs[name].type
            # ε times the roundings of the longest chain (softmax, sums of about 50), relative to the largest number
            largest = max(1.0, float(np.abs(array[np.isfinite(array)]).max(initial=0)))
            tolerance = 200 * np.finfo(np.float64).eps * largest
            np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance)


@pytest.mark.parametrize("op", [OPS[n] for n in sorted(set(OPS) - PRIMITIVES)], ids=lambda op: op.name)
def test_bodies_work_with_named_batch_and_sequence_axes(op: Op) -> None:
    """With the batch and sequence axes of activations named, bodies give the same numbers."""
    for case in op.cases:
        graph, feeds = build_node_graph(op, case)
        symbolic = with_named_axes(op, case)
        verify(symbolic)
        body = expand_bodies(symbolic)
        assert parse(str(body)) == body
        wanted, found = interpret(graph, feeds), interpret(body, feeds)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-12)


WEIGHTS = {
    "gate",
    "a_log",
    "b_weight",
    "c_weight",
    "weight",
    "frequencies",
    "table",
    "slopes",
    "sinks",
    "up",
    "down",
    "a",
    "d",
    "key_table",
    "value_table",
    "k_scale",
    "v_scale",
}


def with_named_axes(op: Op, case: Case) -> Graph:
    """The case's graph with axes of size 2 in front called batch and the next axes of the first operand's size seq."""
    arrays = case.draw()
    first = arrays[0]
    assert first is not None
    graph = Graph(op.name)
    operands: list[Value | None] = []
    given = dict(zip(op.operand_names(arrays), arrays, strict=True))
    past, appends = given.get("past_k"), given.get("positions") is None
    past_keys = past.shape[2] if past is not None and appends else 0
    fed = [*build_node_graph(op, case)[0].inputs]
    for name, array in zip(op.operand_names(arrays), arrays, strict=True):
        if array is None:
            fed.insert(len(operands), "")
            operands.append(None)
            continue
        shape: list[sizes.Size] = list(array.shape)
        weight = name in WEIGHTS and array.shape[:2] != first.shape[:2]  # experts have a gate, and recurrences
        if array.ndim > 1 and not weight and not name.endswith("bias") and first.ndim == 3:
            shape[:2] = ["batch" if shape[0] == 2 else shape[0], "seq" if shape[1] == first.shape[1] else shape[1]]
        elif op.name == "attention" and name == "bias":
            shape[2:] = ["seq" if n == first.shape[1] else n for n in array.shape[2:]]
        if past_keys and name in ("bias", "key_mask"):
            shape[-1] = past_keys + sizes.sym("seq")
        named = tuple(sizes.sym(n) if isinstance(n, str) else n for n in shape)
        kind = {"f": dtypes.f32, "b": dtypes.bool_}.get(array.dtype.kind, dtypes.i64)
        operands.append(graph.add_input(fed[len(operands)], TensorType(kind, named)))
    for i, value in enumerate(op.emit(*operands, **case.attrs)):
        graph.add_output(f"y{i}", value)
    return graph


ORACLES = {*ELEMENTWISE, *ACTIVATION, *NORM, *NORM_LINEAR, *PRODUCTS, *SIGNALS, *REDUCE, *TENSOR, *LATENT}
# The tests of these ops compare them with papers, torch or transformers in other ways.
ELSEWHERE = {
    *("glu", "pack", "add_norm", "attention", "rope", "relative_position_bias", "alibi", "relative_attention", "route"),
    *("block_sparse_attention", "lightning_index"),
    *(
        "limit_capacity",
        "expert_choice",
        "load_balance_loss",
        "moe",
        "linear_attention",
        "causal_conv",
        "choose_tokens",
    ),
    *("selective_scan", "ssd", "gated_linear_attention", "gated_delta_rule", "scan"),
}


def test_every_op_has_an_independent_oracle() -> None:
    """Fused ops are their bodies; tests of kernels compare them with the code that is written for these."""
    fused = {name for name, op in OPS.items() if Trait.FUSED in op.traits}
    assert (ORACLES | ELSEWHERE) - fused == set(OPS) - fused
