"""Initial values of weights in ``_init_weights``: those that transformers would choose otherwise."""

from __future__ import annotations

import pytest

from weft.backends.torch.codegen.structure import Method
from weft.backends.torch.program.statements import ParamRef, Submodule
from weft.backends.torch.transformers.modeling.initial import find_usual_std, write_expert_lines, write_init_lines
from weft.ir import Graph, Param, TensorType
from weft.ir.recipes import Concat, Full, Map, Normal, Recipe, Source, Uniform
from weft.ir.types import dtypes

STD = 0.02


def param(recipe: Recipe, *dims: int) -> Param:
    return Param(Graph("weights"), "w", TensorType(dtypes.f32, dims or (4,)), recipe)


def normal(std: float) -> Normal:
    return Normal((4,), std, "w")


def test_usual_deviation_is_the_most_common() -> None:
    assert find_usual_std([param(normal(0.1)), param(normal(0.3)), param(normal(0.3)), param(Full(1.0, (4,)))]) == 0.3
    assert find_usual_std([]) == 0.02


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (normal(0.5), "normal_(module.w, std=0.5)"),
        (Uniform((4,), -1.0, 1.0, "w"), "uniform_(module.w, -1.0, 1.0)"),
        (Full(0.0, (4,)), "zeros_(module.w)"),
        (Full(1.0, (4,)), "ones_(module.w)"),
        (Full(3.0, (4,)), "constant_(module.w, 3.0)"),
        (Concat((normal(0.5), normal(0.5)), 0), "normal_(module.w, std=0.5)"),
        (Map(normal(0.5), "exp"), "copy_(module.w, torch.empty_like(module.w).normal_(0.0, 0.5).exp())"),
        (Concat((Full(1.0, (1,)), Full(2.0, (1,))), 0),
         "copy_(module.w, torch.arange(1.0, 1 + module.w.shape[-1]).expand_as(module.w))"),
        (Source("w"), None),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_are_initialized_by_their_recipe(recipe: Recipe, text: str | None) -> None:
    method = Method("m", [], members={"m.w": ParamRef("m.w", (4,))})
    lines = write_init_lines({"Block": method}, {"m.w": param(recipe)}, STD)
    assert lines == ([] if text is None else ["if isinstance(module, Block):", f"    init.{text}"])


def test_defaults_of_transformers_need_no_line() -> None:
    method = Method("", [], members={"map": Submodule("map", "nn.Linear(4, 4)", ("weight", "bias"))})
    weights = {"map.weight": param(normal(STD), 4, 4), "map.bias": param(Full(0.0, (4,)))}
    assert write_init_lines({"Block": method}, weights, STD) == []
    assert write_init_lines({"Block": method}, weights, 0.5) == [
        "if isinstance(module, Block):",
        "    init.normal_(module.map.weight, std=0.02)",
    ]


def test_matrices_of_a_checkpoint_are_normal() -> None:
    method = Method("", [], members={"w": ParamRef("w", (4, 4)), "t": ParamRef("t", (4,), constant=True)})
    weights = {"w": param(Source("w"), 4, 4), "t": param(normal(0.5))}
    assert write_init_lines({"A": method}, weights, STD) == [
        "if isinstance(module, A):",
        "    init.normal_(module.w, std=0.02)",
    ]


def test_experts_are_initialized_once_per_class() -> None:
    experts = {"layers.0.e": "Experts", "layers.1.e": "Experts"}
    weights = {f"{home}.{n}": param(normal(0.5), 2, 4, 4) for home in experts for n in ("up_proj", "down_proj")}
    assert write_expert_lines(experts, weights, STD) == [
        "if isinstance(module, Experts):",
        "    init.normal_(module.up_proj, std=0.5)",
        "    init.normal_(module.down_proj, std=0.5)",
    ]
