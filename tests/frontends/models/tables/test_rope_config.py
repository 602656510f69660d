"""RoPE settings in configs of both formats, read and written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.frontends.models.tables.rope_config import (
    LONG,
    SHORT,
    build_ropes,
    find_rope,
    read_context,
    read_gguf_rope,
    read_rope,
    rope_with,
    write_gguf_rope,
    write_rope,
)
from weft.ir import WeftError

CONTEXT = {"max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0],
    "long_factor": [2.0],
    "original_max_position_embeddings": 16,
}


def test_plain_rope() -> None:
    assert (read_rope({}).theta, read_rope({"rope_theta": 5e5}).theta) == (1e4, 5e5)
    assert read_rope({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7.0}}).theta == 7.0
    assert read_rope({"partial_rotary_factor": 0.5}).fraction == 1.0
    assert read_rope({"partial_rotary_factor": 0.5}, partial=True).fraction == 0.5


def test_yarn_amplitude_grows_with_the_logarithm_of_the_factor() -> None:
    rope = read_rope({**CONTEXT, "rope_scaling": YARN})
    assert (rope.scaling, rope.factor, rope.original) == ("yarn", 4.0, 16)
    assert rope.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    assert read_rope({**CONTEXT, "rope_scaling": {**YARN, "attention_factor": 0.5}}).amplitude == 0.5


def test_older_names_of_longrope() -> None:
    for kind in ("su", "yarn"):
        rope = read_rope({**CONTEXT, "rope_scaling": {**LONGROPE, "rope_type": kind}})
        assert (rope.scaling, rope.factors, rope.long_factors) == ("longrope", (1.0,), (2.0,))
        assert rope.amplitude == pytest.approx((1 + math.log(4) / math.log(16)) ** 0.5)
    assert read_context({**CONTEXT, "rope_scaling": LONGROPE}) == 16
    assert (read_context(CONTEXT), read_context({})) == (64, None)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "magic"}, "rope_type='magic' is unknown; known are default, linear"),
        ({"rope_type": "linear"}, "rope_type='linear' needs the config key 'factor'"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0 must exceed low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "not supported with rope_scaling"),
    ],
)
def test_refusals(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        read_rope({**CONTEXT, "rope_parameters": rope})


def test_settings_by_layer_type_and_other_types_are_refused() -> None:
    with pytest.raises(WeftError, match="differ by layer type are not supported"):
        find_rope({"rope_parameters": {"full_attention": {}}})
    with pytest.raises(WeftError, match="rope_parameters=3 must be a mapping"):
        find_rope({"rope_parameters": 3})
    assert find_rope({"rope_scaling": YARN}) == YARN and find_rope({}) == {}


def test_defaults_apply_to_missing_and_null_keys() -> None:
    rule = rope_with(rope_theta=5e5, interleaved=True, partial_rotary_factor=0.5)
    assert (rule({"rope_theta": None}).theta, rule({}).interleaved, rule({}).fraction) == (5e5, True, 0.5)
    assert rule({"rope_theta": 7.0, "partial_rotary_factor": 1.0}).theta == 7.0
    scaled = rope_with(rope_parameters={"rope_theta": 3.0})
    assert scaled({}).theta == 3.0
    assert scaled({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).scaling == "linear"


def test_local_layers_have_their_own_base_without_scaling() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    rule = build_ropes(lambda c: (8, None), bases=(lambda c: 1e6, lambda c: 1e4))
    near, wide = rule({**CONTEXT, "rope_scaling": linear})
    assert (near.theta, near.scaling, wide.theta, wide.scaling) == (1e4, "none", 1e6, "linear")
    typed = {"full_attention": {"rope_theta": 2.0}, "sliding_attention": {"rope_theta": 3.0}}
    assert [rope.theta for rope in build_ropes(lambda c: (8, None))({"rope_parameters": typed})] == [3.0, 2.0]


@pytest.mark.parametrize(
    "rope",
    [{}, YARN, {**LLAMA3, "original_max_position_embeddings": 16}, LONGROPE, {"rope_type": "linear", "factor": 2.0}],
)
def test_written_parameters_are_read_back(rope: dict[str, Any]) -> None:
    made = read_rope({**CONTEXT, "rope_parameters": {**rope, "rope_theta": 7.0}})
    assert read_rope({**CONTEXT, "rope_parameters": write_rope(made, 8, partial=False)}) == made
    assert write_rope(made, 8, partial=True)["partial_rotary_factor"] == 1.0


def test_keys_of_files() -> None:
    file = {"rope.freq_base": 5e5, "rope.dimension_count": 4, "context_length": 64}
    assert (read_gguf_rope(file).theta, read_gguf_rope(file).dim, read_gguf_rope(file).scaling) == (5e5, 4, "none")
    scaled = {**file, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert (read_gguf_rope(scaled).scaling, read_gguf_rope(scaled).factor) == ("linear", 2.0)
    assert read_gguf_rope({**scaled, "rope.scaling.factor": 1.0}).scaling == "none"
    assert (
        read_gguf_rope({**file, SHORT: (1.0, 1.0), LONG: (2.0, 2.0), "rope.scaling.factor": 4.0}).scaling == "longrope"
    )
    with pytest.raises(WeftError, match=r"rope.scaling.type='magic' is not supported"):
        read_gguf_rope({"rope.scaling.type": "magic", "rope.scaling.factor": 2.0})


@pytest.mark.parametrize("rope", [{}, YARN, {**YARN, "attention_factor": 1.5}, {"rope_type": "linear", "factor": 2.0}])
def test_written_keys_of_files_are_read_back(rope: dict[str, Any]) -> None:
    made = read_rope({**CONTEXT, "rope_parameters": {**rope, "rope_theta": 7.0}})
    again = read_gguf_rope({**write_gguf_rope(made), "context_length": 64})
    assert (again.theta, again.scaling, again.settings) == (made.theta, made.scaling, made.settings)
    assert again.amplitude == pytest.approx(made.amplitude)
