"""Modeling files: keys of weights, tied weights, tasks, and sources that define all that they use."""

from __future__ import annotations

import ast
import builtins
import re

import pytest

from weft.backends.torch.transformers.modeling.modeling_file import (
    collect_weights,
    get_task_class,
    is_table,
    map_keys,
    map_tied_keys,
)
from weft.ir import Graph, TensorType, WeftError
from weft.ir.recipes import Literal, Normal
from weft.ir.types import dtypes

from ..tiny import MODELS, base_of, modeling_of


@pytest.mark.parametrize("name", MODELS)
def test_source_defines_or_imports_every_class_that_it_calls(name: str) -> None:
    tree = ast.parse(modeling_of(name).text)
    known = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    known |= {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not {n for n in calls if n[0].isupper()} - known - {*dir(builtins)}
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    assert ("TinyForCausalLM" in classes) == (name != "encoder") and "TinyModel" in classes


def test_keys_have_the_prefix_of_the_base_model_under_a_head() -> None:
    dense, encoder = (map_keys([base_of(name).lowered]) for name in ("dense", "encoder"))
    assert "model.embed_tokens.weight" in dense.values() and "lm_head.weight" in dense.values()
    assert "embed_tokens.weight" in encoder.values()
    assert set(encoder) == set(base_of("encoder").lowered.full_graph.params)


def test_tied_head_stores_no_weight() -> None:
    tied, dense = ([base_of(name).lowered] for name in ("tied", "dense"))
    assert map_tied_keys(tied) == {"lm_head.weight": "model.embed_tokens.weight"} and map_tied_keys(dense) == {}
    assert map_tied_keys(tied, head=False) == {}
    weights = collect_weights(tied)
    assert "embed_tokens.weight" in weights and "lm_head.weight" not in weights


def test_constant_and_integer_parameters_are_tables() -> None:
    graph = Graph("tables")
    f32, i64 = (TensorType(kind, (2,)) for kind in (dtypes.f32, dtypes.i64))
    table = graph.add_param("t", f32, Literal((1.0, 2.0), (2,)))
    weight, index = graph.add_param("w", f32, Normal((2,), 0.5, "w")), graph.add_param("i", i64, Normal((2,), 0.5, "i"))
    assert [is_table(p) for p in (table, weight, index)] == [True, False, True]


def test_tasks_have_a_class_of_transformers() -> None:
    assert get_task_class(None) is None
    assert get_task_class("fill-mask") == ("MaskedLM", "MaskedLMOutput", ("labels",))
    message = "target transformers has no class for the task object-detection: use target torch, or text-class"
    with pytest.raises(WeftError, match=re.escape(message)):
        get_task_class("object-detection")
