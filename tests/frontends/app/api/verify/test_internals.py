"""Values inside compiled ONNX models: their layers, and their contents next to those of the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft.frontends.app.api.verify.internals import find_layer, make_inputs, measure_depth, open_internals, to_array
from weft.ir import WeftError, interpret

IDS = [3, 1, 4, 1, 5]


def test_layers_of_values() -> None:
    names = {"layers.3.attn.q": "layers.3", "encoder.layers.12.ffn": "encoder.layers.12", "embed.weight": "", "a.7": ""}
    assert {name: find_layer(name) for name in names} == names


def test_inputs_follow_from_token_ids() -> None:
    made = make_inputs(["input_ids", "position_ids", "encoder_attention_mask"], [5, 6], [7, 8, 9])
    assert {name: x.tolist() for name, x in made.items()} == {
        "input_ids": [[5, 6]],
        "position_ids": [[0, 1]],
        "encoder_attention_mask": [[1, 1, 1]],
    }
    with pytest.raises(
        WeftError, match=r"it has the input pixels, and only input_ids, .* can be computed from token ids"
    ):
        make_inputs(["pixels"], IDS)


def test_residual_streams_are_those_of_the_interpreter(tiny: Path, compiled_tiny: Path) -> None:
    model = weft.load(compiled_tiny, "cpu")
    (internals,) = open_internals(model)
    assert [*internals.boundaries] == [*internals.streams] == ["layers.0", "layers.1", "layers.2"]
    assert measure_depth(model) == (3, 32)  # the model is 32 wide, its feed-forward 48
    names = internals.streams["layers.1"]
    values = internals.run(make_inputs(internals.inputs, IDS), names)
    graph = weft.load_source(tiny).graph
    inputs = {"input_ids": np.array([IDS]), "position_ids": np.arange(5)[None]}
    watched: dict[str, np.ndarray] = {}
    interpret(
        graph,
        {k: v for k, v in inputs.items() if k in graph.inputs},
        watch=lambda node, results: watched.update({node.output.name: results[0]}),
    )
    expected = watched["layers.1.ffn_residual"]
    np.testing.assert_allclose(sum(map(to_array, values.values())), expected, atol=1e-5 * np.abs(expected).max())
    assert internals.run({}, []) == {}
