"""The family of a graph: the first candidate whose graph is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.fitting import Candidate, fit_dtype, fit_family
from weft.frontends.models.families import FAMILIES, build_from_table
from weft.ir import Graph, WeftError
from weft.ir.types import dtypes

from .folders import CONFIG, LAYER, SHAPES, write_llama


def llama(**changes: Any) -> Candidate:
    config = {**CONFIG, **changes}
    return Candidate(
        "llama", config, build_from_table(FAMILIES["llama"], config, frozenset(SHAPES), "a config"), SHAPES
    )


def test_first_equal_candidate_gives_names_values_and_kinds(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")

    def list_candidates(graph: Graph) -> Iterator[Candidate]:
        yield llama(rms_norm_eps=0.5)
        yield llama()
        raise AssertionError("a candidate fits already")

    fit = fit_family(model, list_candidates, "toy family")
    assert (fit.family, fit.config["rms_norm_eps"], fit.tensors.keys()) == ("llama", 1e-5, tensors.keys())
    for key, tensor in fit.tensors.items():
        np.testing.assert_array_equal(tensor.recipe.evaluate(model.graph.reader), tensors[key])
    kinds = {key.removeprefix(LAYER): kind for key, kind in fit.kinds.items()}
    assert kinds["self_attn.q_proj.weight"] == kinds["mlp.down_proj.weight"] == "linear"
    assert kinds["model.embed_tokens.weight"] == "table" and "input_layernorm.weight" not in kinds


def test_unusual_attention_scale_is_folded_into_queries(tmp_path: Path) -> None:
    """Scale 1 instead of 1/√2, as heads have 2 features: queries are √2 times as large."""
    tensors = write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")
    for node in model.graph.nodes:
        if node.op.name == "attention":
            node.attrs["scale"] = 1.0
    fit = fit_family(model, lambda graph: iter([llama()]), "toy family")
    query = f"{LAYER}self_attn.q_proj.weight"
    values = fit.tensors[query].recipe.evaluate(model.graph.reader)
    np.testing.assert_allclose(values, tensors[query] * 2**0.5, rtol=1e-6)


def test_graph_without_equal_candidate_is_refused_with_the_nearest_difference(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")
    with pytest.raises(WeftError) as error:
        fit_family(
            model,
            lambda graph: iter([llama(hidden_act="gelu", rms_norm_eps=0.5), llama(rms_norm_eps=0.5)]),
            "toy family",
        )
    assert str(error.value) == (
        f"{model.spec}: no toy family expresses the graph: the nearest, llama, differs at "
        "layers.0.attn_norm: it has eps=0.5, the graph eps=1e-05"
    )
    with pytest.raises(WeftError, match="no known config is similar"):
        fit_family(model, lambda graph: iter(()), "toy family")


def test_graph_with_caches_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = rewrite(load_source(tmp_path / "model"), "kv-cache")
    with pytest.raises(WeftError, match="export before the pass kv-cache"):
        fit_family(model, lambda graph: iter([llama()]), "toy family")


@pytest.mark.parametrize(
    ("stored", "pipeline", "expected"),
    [
        (np.float16, "", dtypes.f16),
        (np.float32, "", dtypes.f32),
        (np.float16, "fold-norm-scale", dtypes.f32),  # products are not in the checkpoint's dtype
        (np.float32, "cast{dtype=bf16}", dtypes.bf16),
    ],
)
def test_dtype_is_the_smallest_exact_one(stored: type, pipeline: str, expected: dtypes.DType, tmp_path: Path) -> None:
    write_llama(tmp_path / "model", stored)
    model = rewrite(load_source(tmp_path / "model"), pipeline)
    fit = fit_family(model, lambda graph: iter([llama()]), "toy family")
    assert fit_dtype(model.graph, fit.tensors.values()) == expected
