"""Sizes as Python expressions over config fields."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.backends.torch.transformers.config_fields.expressions import ConfigValue, write_expression
from weft.ir.types.sizes import Size, evaluate, floordiv, sym

H, N, D = sym("hidden_size"), sym("num_heads"), sym("head_dim")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7"),
        (H, "config.hidden_size"),
        (D * N, "config.num_heads * config.head_dim"),
        (N * 2, "2 * config.num_heads"),
        (D * D, "config.head_dim ** 2"),
        (N + -1, "(config.num_heads - 1)"),
        (floordiv(H, N), "((config.hidden_size // config.num_heads))"),
    ],
)
def test_expressions_read_the_config(size: Size, text: str) -> None:
    assert write_expression(size) == text
    values = {"hidden_size": 32, "num_heads": 4, "head_dim": 6}
    assert eval(text, {"config": SimpleNamespace(**values)}) == evaluate(size, values)


def test_config_values_compute_and_print_their_expression() -> None:
    heads, kv = ConfigValue(8, N), ConfigValue(4, sym("kv"))
    groups = heads // kv
    assert isinstance(groups, ConfigValue) and int(groups) == 2
    assert f"{heads - 1}" == "(config.num_heads - 1)" and int(heads - 1) == 7
    assert "config.num_heads // config.kv" in repr(groups)
    width = ConfigValue(24, N * D) // ConfigValue(4, N)
    assert (int(width), str(width)) == (6, "config.head_dim")
    assert int(ConfigValue(8, N) // heads) == 1
    rest = 32 // heads
    assert int(rest) == 4 and "32 // config.num_heads" in str(rest)
