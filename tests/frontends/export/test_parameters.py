"""Parameters as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.export.parameters import write_parameters
from weft.ir import WeftError
from weft.ir.recipes import Scale

from .folders import LAYER, write_llama


def test_parameters_have_their_names_values_and_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model", np.float16)
    model = rewrite(load_source(tmp_path / "model"), "pack-qkv")
    steps = list[tuple[str, int, int]]()
    write_parameters(model, tmp_path / "out", progress=lambda *step: steps.append(step))
    written = load_file(tmp_path / "out")
    packed = np.concatenate([tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv"])
    np.testing.assert_array_equal(written["layers.0.attn.qkv.weight"], packed)
    assert {array.dtype for array in written.values()} == {np.dtype(np.float16)}
    assert "rope.frequencies" not in written and len(written) == len(tensors) - 2
    assert steps[-1][1] == steps[-1][2] == sum(array.nbytes for array in written.values())


def test_requested_dtype_rounds_the_values(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "model")
    write_parameters(load_source(tmp_path / "model"), tmp_path / "out", dtype="f16")
    written = load_file(tmp_path / "out")
    np.testing.assert_array_equal(written["lm_head.weight"], tensors["lm_head.weight"].astype(np.float16))


def test_value_beyond_the_dtype_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    model = load_source(tmp_path / "model")
    head = model.graph.params["lm_head.weight"]
    head.recipe = Scale(head.recipe, 1e6)
    with pytest.raises(WeftError, match=r"lm_head\.weight"):
        write_parameters(model, tmp_path / "out", dtype="f16")
    assert not (tmp_path / "out").exists()
