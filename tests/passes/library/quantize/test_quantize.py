"""The pass quantize: which weights it takes, what it makes of them, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft.ir import Graph, MemoryReader, WeftError, interpret, ops
from weft.ir.recipes.blocks import Dequantize, Quantize, find_block_layout
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import BlockLayout
from weft.passes import Report, run_passes
from weft.passes.fitting.matrices import Matrix, find_matrices

from ...rewrites import Rewrite, rewrites
from .checkpoints import USED, kinds, mixture, model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "ids.npy", rng.integers(0, USED, (48, 32)))
    return tmp_path / "ids.npy"


def logits(graph: Graph, seed: int = 2) -> Array:
    ids = np.random.default_rng(seed).integers(0, USED, (4, 24))
    inputs = {"input_ids": ids, "position_ids": np.arange(24)[None].repeat(4, 0)}
    found = interpret(graph, {name: array for name, array in inputs.items() if name in graph.inputs})
    return found["logits"]


def error(graph: Graph, quantized: Graph) -> float:
    exact, found = logits(graph), logits(quantized)
    return float(np.sqrt(np.square(exact - found).mean() / np.square(exact - exact.mean()).mean()))


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("zeros", ["true", "false"])
def test_fitting_to_a_text_loses_less_than_rounding(bits: int, zeros: str, text: Path) -> None:
    graph = model(tied=True)
    rounded = run_passes(graph, f"quantize{{bits={bits}, zeros={zeros}, method=rtn}}")
    fitted = run_passes(graph, f"quantize{{bits={bits}, zeros={zeros}, method=gptq, calibration={text}}}")
    assert error(graph, fitted) < 0.9 * error(graph, rounded)
    assert isinstance(rounded.params["layers.0.ffn.up.weight"].recipe, Quantize)
    assert isinstance(fitted.params["layers.0.ffn.up.weight"].recipe, Dequantize)


def test_experts_are_fitted_each_to_its_tokens(text: Path) -> None:
    graph = mixture()
    rounded = run_passes(graph, "quantize{bits=3, method=rtn}")
    fitted = run_passes(graph, f"quantize{{bits=3, method=gptq, calibration={text}}}")
    assert error(graph, fitted) < 0.9 * error(graph, rounded)
    stack = fitted.params["layers.1.ffn.experts.down"]
    assert isinstance(stack.recipe, Dequantize) and stack.recipe.evaluate(fitted.reader).shape == (4, 48, 32)


def test_floats_of_8_bits_lose_more_than_integers_of_8_and_less_than_those_of_4() -> None:
    graph = model(tied=True)
    quantized = run_passes(graph, "quantize{format=fp8}", verify=True)
    made = [quantized.params[p.name].recipe for p, m in find_matrices(graph).items() if isinstance(m, Matrix)]
    assert {str(find_block_layout(recipe, quantized.reader)) for recipe in made} == {"f8e4m3_128"}
    int8, int4 = (run_passes(graph, f"quantize{{bits={bits}, head={bits}, method=rtn}}") for bits in (8, 4))
    assert error(graph, int8) < error(graph, quantized) < error(graph, int4)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_floats_of_4_bits_lose_more_than_those_of_8(form: str) -> None:
    for graph in (model(tied=True), mixture()):
        quantized = run_passes(graph, f"quantize{{format={form}}}", verify=True)
        for param, matrix in find_matrices(graph).items():
            if isinstance(matrix, Matrix):
                layout = find_block_layout(quantized.params[param.name].recipe, quantized.reader)
                assert str(layout) == ("int8_32" if matrix.kind in ("head", "table") else form)
        fp8, int2 = (run_passes(graph, f"quantize{{{how}}}") for how in ("format=fp8", "bits=2, head=2, method=rtn"))
        assert error(graph, fp8) < error(graph, quantized) < error(graph, int2)


def test_head_bits_and_kept_names(text: Path) -> None:
    graph, report = model(), Report()
    quantized = run_passes(graph, 'quantize{bits=4, head=8, method=rtn, keep="down, layers.1.attn.*"}', report=report)
    bits = {n: p.recipe.bits for n, p in quantized.params.items() if isinstance(p.recipe, Quantize)}
    assert bits["embed.weight"] == bits["lm_head.weight"] == 8
    assert bits["layers.0.attn.q.weight"] == 4 and bits["layers.1.ffn.up.weight"] == 4
    assert not {n for n in bits if "down" in n or n.startswith("layers.1.attn")}
    assert "kept %layers.0.ffn.down.weight" in str(report)


def test_shared_weights_are_rounded_once_for_all_that_they_multiply(text: Path) -> None:
    graph = model()
    for name in ("q", "k", "v", "o"):
        second, first = graph.params[f"layers.1.attn.{name}.weight"], graph.params[f"layers.0.attn.{name}.weight"]
        second.replace_uses(first)
        graph.erase_param(second)
    rounded = run_passes(graph, "quantize{bits=3, method=rtn}")
    fitted = run_passes(graph, f"quantize{{bits=3, method=gptq, calibration={text}}}")
    assert error(graph, fitted) < 0.9 * error(graph, rounded)
    assert len(fitted.params["layers.0.attn.q.weight"].users) == 2


def test_tied_table_stays_tied_when_the_stream_is_rotated() -> None:
    graph = model(tied=True)
    rotated = run_passes(graph, "fold-norm-scale, rotate-residual", verify=True)
    np.testing.assert_allclose(logits(rotated), logits(graph), rtol=0, atol=1e-4 * np.abs(logits(graph)).max())
    assert {node.op.name for node in rotated.params["embed.weight"].users} == {"embedding", "linear"}
    assert kinds(rotated)["final_norm.gain.weight"] == "head"
    apart = run_passes(model(), "fold-norm-scale, rotate-residual", verify=True)
    assert "final_norm.gain.weight" not in apart.params


def test_quantized_weights_are_not_quantized_again() -> None:
    once = run_passes(model(), 'quantize{method=rtn, keep="down"}')
    report = Report()
    twice = run_passes(once, "quantize{bits=8, method=rtn}", report=report)
    assert twice.params["layers.0.ffn.up.weight"].recipe == once.params["layers.0.ffn.up.weight"].recipe
    assert "it is quantized already (uint4_32)" in str(report)
    down = twice.params["layers.0.ffn.down.weight"].recipe
    assert isinstance(down, Quantize) and down.bits == 8


def test_packing_joins_blocks_of_equal_layout_only() -> None:
    graph = run_passes(model(), 'quantize{method=rtn, keep="v"}, quantize{bits=8, method=rtn}, pack-qkv')
    for param in graph.params.values():
        if param.type.rank == 2 and param.uses:
            assert isinstance(find_block_layout(param.recipe, graph.reader), BlockLayout), param.name


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("bits=5", "bits=5 must be one of 2, 3, 4, 8"),
        ("head=1", "head=1 must be one of 2, 3, 4, 8"),
        ("group=48", "group=48 must be 16, 32, 64, 128 or 256"),
        ("method=rtn, calibration=a.txt", "method=rtn reads no text"),
        ("method=gptq", "the model has no tokenizer for it: give calibration="),
        ("method=gptq, calibration=none.npy", "none.npy"),
        ("tokens=0", "tokens=0 must be positive"),
        ("format=fp8, method=gptq", "format=fp8 is rounded to the nearest: it takes no method"),
        ("format=fp8, budget=4.5", "format=fp8 is rounded to the nearest: it takes no method and no budget"),
        ("format=fp8, calibration=a.txt", "format=fp8 reads no text"),
        ("format=nvfp4, method=gptq", "format=nvfp4 is rounded to the nearest: it takes no method"),
        ("format=mxfp4, calibration=a.txt", "format=mxfp4 reads no text"),
        ("format=fp4", 'format="fp4" must be one of int, fp8, mxfp4, nvfp4'),
        ("method=awq", 'method="awq" must be one of auto, fast, best, rtn, kquant, hqq, gptq'),
        ("method=hqq, bits=3", "method=hqq needs bits=4 and zeros=true, without budget="),
        ("method=hqq, zeros=false", "method=hqq needs bits=4 and zeros=true"),
        ("method=hqq, budget=4.5", "method=hqq .* without budget="),
        ("method=hqq, calibration=a.txt", "method=hqq reads no text"),
    ],
)
def test_invalid_arguments_are_refused(arguments: str, why: str) -> None:
    with pytest.raises(WeftError, match=why):
        run_passes(model(), f"quantize{{{arguments}}}")


def test_short_calibration_text_is_refused_with_the_required_length(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.arange(40)[None])
    with pytest.raises(WeftError, match="has 40 tokens, and gptq needs 256 or more"):
        run_passes(model(), f"quantize{{method=gptq, calibration={tmp_path / 'few.npy'}}}")


def test_graphs_with_caches_are_rounded_to_the_nearest_or_refused(text: Path) -> None:
    cached = run_passes(model(), "kv-cache")
    with pytest.raises(WeftError, match=r"has caches already.*: run quantize before kv-cache, or with method=rtn"):
        run_passes(cached, f"quantize{{calibration={text}}}")
    assert isinstance(run_passes(cached, "quantize{method=rtn}").params["layers.0.ffn.up.weight"].recipe, Quantize)


def test_graphs_without_matrices_are_refused() -> None:
    graph = Graph("bare")
    x = graph.add_input("x", weft.ir.TensorType(weft.ir.types.dtypes.f32, (2, 3)))
    graph.add_output("y", ops.relu(x))
    with pytest.raises(WeftError, match="graph bare has no weight matrix that can be quantized"):
        run_passes(graph, "quantize")


def test_weights_that_are_not_finite_are_named() -> None:
    graph = model()
    reader = graph.reader
    assert isinstance(reader, MemoryReader)
    reader.arrays["layers.0.ffn.up.weight"][3, 5] = np.nan
    quantized = run_passes(graph, "quantize{method=rtn}")
    with pytest.raises(WeftError, match=r"a weight of layers.0.ffn.up.weight is not finite"):
        logits(quantized)


@pytest.mark.parametrize(
    ("fast", "same"),
    [
        ("method=fast", "method=kquant, head=8"),
        ("bits=8, method=fast", "bits=8, method=rtn"),
        ("method=best, calibration={text}, tokens=256", "calibration={text}, tokens=256"),
    ],
)
def test_fast_and_best_are_names_of_methods(fast: str, same: str, text: Path) -> None:
    """Fast searches scales of few bits, and rounds those of 8."""
    results = []
    for arguments in (fast, same):
        graph = run_passes(model(), f"quantize{{{arguments.replace('{text}', str(text))}}}")
        results.append({name: param.recipe.evaluate(graph.reader) for name, param in graph.params.items()})
    for name, array in results[0].items():
        if "kquant" not in same or not name.startswith(("embed", "lm_head")):
            np.testing.assert_array_equal(array, results[1][name], name)
