"""The node tests of the onnx package, as far as weft's ops express them: the interpreter and ONNX Runtime agree."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, interpret, verify
from weft.passes import legalize

from .onnx_cases import node_cases
from .onnx_importer import RULES, Array, InexpressibleError, genuine_tables, imported

EXPRESSED = {  # of all cases; attention's without the scores that some return
    "Attention": (87, 93),
    "FlexAttention": (6, 11),
    "RotaryEmbedding": (8, 8),
    "RMSNormalization": (19, 19),
    "LayerNormalization": (19, 19),
    "LinearAttention": (11, 14),
    "CausalConvWithState": (12, 13),
}
REASONS = {
    "a window of different width to the left and to the right": 1,
    "as many queries as new keys are not given": 3,
    "more queries than keys": 2,
    "a score_mod graph": 4,
    "a prob_mod graph": 1,
    "several queries of one state": 3,
    "a convolution of width 1": 1,
}


@functools.cache
def cases() -> dict[str, list[tuple[onnx.ModelProto, str, list[Array], list[Array]]]]:
    """(model, name, inputs, outputs) of every case of one node, by operator.

    The tables of rotary cases are random; they get genuine ones, and what onnx computes with them.
    """
    found: dict[str, list[Any]] = {name: [] for name in RULES}
    for case in node_cases(*RULES):
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in found:
            ((given, wanted),) = case.data_sets
            if nodes[0].op_type == "RotaryEmbedding":
                given = genuine_tables(given)
                names = (i.name for i in case.model.graph.input)
                wanted = ReferenceEvaluator(case.model).run(None, dict(zip(names, given, strict=True)))
            found[nodes[0].op_type].append((case.model, case.name, given, wanted))
    return found


def compiled(graph: Graph, feeds: dict[str, Array], target: str) -> dict[str, Array]:
    place = TARGETS[target]
    lowered = graph.clone()
    legalize(lowered, lambda node: list_refusals(node, place))
    session = ort.InferenceSession(
        serialize_model(build_model(lowered, place, max_length=64)), providers=["CPUExecutionProvider"]
    )
    used = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in used}), strict=True))


@pytest.mark.halved
@pytest.mark.parametrize("target", ["interpreter", "onnx", "ort-cpu"])
@pytest.mark.parametrize("operator", RULES)
def test_expressible_cases_agree_with_expected_outputs(operator: str, target: str) -> None:
    for model, name, given, wanted in cases()[operator]:
        node = model.graph.node[0]
        try:
            graph, feeds = imported(node, given)
        except InexpressibleError:
            continue
        verify(graph)
        found = interpret(graph, feeds) if target == "interpreter" else compiled(graph, feeds, target)
        places = [f"y{i}" for i, output in enumerate(node.output) if output]
        assert "y0" in found
        for place, reference in zip(places, wanted, strict=True):
            if place not in found:
                continue
            loose = {"bfloat16": 2e-2, "float16": 2e-3}.get(str(reference.dtype), 2e-5)
            mine, theirs = (np.asarray(x).astype(np.float64) for x in (found[place], reference))
            np.testing.assert_allclose(mine, theirs, rtol=loose, atol=loose, err_msg=f"{name} {place}")


def test_number_of_expressible_cases_does_not_fall() -> None:
    """Every case counts; those left out say why."""
    expressed, reasons = Counter[str](), Counter[str]()
    for operator, every in cases().items():
        for model, _, given, _ in every:
            try:
                imported(model.graph.node[0], given)
                expressed[operator] += 1
            except InexpressibleError as e:
                reasons[str(e)] += 1
    assert {name: (expressed[name], len(every)) for name, every in cases().items()} == EXPRESSED
    assert reasons == REASONS
