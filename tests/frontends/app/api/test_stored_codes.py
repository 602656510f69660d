"""Weights of GGUF files in few bits that stay in the blocks which the file has them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

import weft
from weft.backends.onnx import export
from weft.backends.target import TARGETS
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.source.sources import load_source
from weft.frontends.app.api.weights import expand_weights
from weft.frontends.formats.weft.model_folder import write_model
from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.recipes.blocks import AsStored, BlockRecipe, Dequantize, OnGrid, Quantize
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import build_offset_layout
from weft.passes import Trace, legalize, run_passes
from weft.passes.library.quantize import quantize as pass_module
from weft.passes.library.target.stored_codes import KeepBlocks

from ....backends.onnx.quantized_llama import write
from ....sampling import by_turns
from ...formats.gguf.gguf_models import write_gguf
from ...formats.gguf.gguf_sparse import SPARSE
from .test_weights import ExactOptions

IDS = np.random.default_rng(1).integers(0, 96, 20).tolist()  # of the smallest vocabulary


def quantized(source: Path, weights: str) -> tuple[Graph, Graph]:
    graph = load_source(str(source)).graph
    return graph, run_passes(graph, expand_weights(graph, weights))


def logits(graph: Graph) -> np.ndarray:
    inputs = {"input_ids": np.array([IDS]), "position_ids": np.arange(len(IDS))[None]}
    found: np.ndarray = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})["logits"][0]
    return found


def linear_maps(graph: Graph) -> list[str]:
    return [name for name, p in graph.params.items() if name.startswith("layers.") and p.type.rank == 2]


@pytest.mark.parametrize(
    ("kind", "weights"), [(Type.Q4_0, "int4"), (Type.Q4_0, "int8"), (Type.Q8_0, "int8")], ids=lambda k: str(k)
)
def test_symmetric_blocks_stay_bit_identical(kind: Type, weights: str, tmp_path: Path) -> None:
    before, after = quantized(write(tmp_path / "model.gguf", {"": kind}), weights)
    for name in (*linear_maps(before), "embed.weight"):
        recipe = after.params[name].recipe
        assert recipe.has(AsStored)
        np.testing.assert_array_equal(recipe.evaluate(after.reader), before.params[name].recipe.evaluate(before.reader))


def test_codes_with_minima_are_kept_with_small_loss(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0})
    before, after = quantized(source, "int4")
    anew = run_passes(before, "quantize{method=rtn}")
    for name in linear_maps(before):
        exact, found, rounded = (
            g.params[name].recipe.evaluate(g.reader).astype(np.float64) for g in (before, after, anew)
        )
        assert str(after.params[name].recipe.evaluate(after.reader).dtype) == "float32"
        assert np.square(found - exact).mean() < np.square(rounded - exact).mean() / 30
    assert after.params["embed.weight"].recipe.has(AsStored)


@pytest.mark.parametrize(
    "weights", ["int4{group=64}", "int4{method=rtn}", "int4{method=kquant}", "int2", "int3{method=rtn}"]
)
def test_explicit_arguments_round_stored_codes(weights: str, tmp_path: Path) -> None:
    _, after = quantized(write(tmp_path / "model.gguf", {"": Type.Q4_1}), weights)
    for name in linear_maps(after):
        recipe = after.params[name].recipe
        assert recipe.has(BlockRecipe) and not recipe.has(AsStored)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1], ids=lambda k: k.name)
@pytest.mark.parametrize("target", ["ort-cpu", "onnx", "torch"])
def test_folders_give_the_logits_of_the_blocks(
    kind: Type, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    source = write(tmp_path / "model.gguf", {"": kind, "token_embd": Type.Q8_0, "ffn_down": Type.Q4_1})
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    report = weft.compile(source, tmp_path / "out", target=target, weights="int4", **options)
    exact = logits(quantized(source, "int4")[1])
    found = weft.load(tmp_path / "out", trust=target == "torch").logits(IDS)
    np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text())["blocks"]
    assert blocks.keys() == {"q8_0", "uint4_32_sums", *({"q4_0"} if kind == Type.Q4_0 else ())}
    assert not any("not as codes" in note for note in report.notes)


def test_rounding_activations_costs_little(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0})
    weft.compile(source, tmp_path / "out", weights="int4")
    exact = logits(load_source(str(source)).graph)[-1]
    found = weft.load(tmp_path / "out").logits(IDS)[-1]
    assert 0 < np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


def as_stored(numbers: np.ndarray, kind: Type, tmp_path: Path) -> tuple[np.ndarray, np.ndarray, AsStored, Graph]:
    """`numbers` [64, 64] as a file has them and as blocks hold these, and the recipe of the blocks."""
    from weft.ir.recipes import Source

    path = tmp_path / "model.gguf"
    raw = quantize(numbers.astype(np.float32), kind)
    write(path, {"": kind}, {"blk.0.attn_q.weight": raw})
    graph = load_source(str(path)).graph
    recipe = AsStored(Source("blk.0.attn_q.weight"))
    return dequantize(raw, kind), recipe.evaluate(graph.reader), recipe, graph


def test_unusual_blocks_are_kept_within_a_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((64, 64))
    numbers[1] = 0
    numbers[2] = 3  # no scale
    numbers[3] += 100  # zero is far from all
    numbers[4, :32] *= 1e-3  # beside large ones
    numbers[5, 32:] = -7
    exact, found, recipe, graph = as_stored(numbers, Type.Q4_1, tmp_path)
    layout = recipe.layout(graph.reader)
    assert layout == build_offset_layout(4, 32) and layout.row_bits(64) == 3 * 140 + 16
    steps = np.abs(exact).reshape(64, 2, 32).max(-1).repeat(32, -1) / 15
    error = np.abs(found - exact)
    assert (error[[1]] == 0).all() and (error[[2, 5]] < 0.02).all()
    # Where 0 is far, codes reach from 0 on. Offsets of a row share their step.
    assert (error <= 0.6 * np.maximum(steps, steps.max(1, keepdims=True) / 15)).all()
    ordinary = np.delete(np.arange(64), [1, 2, 3, 4, 5])
    assert np.sqrt(np.square(error[ordinary]).mean()) < 0.03 * steps[ordinary].mean()


@pytest.mark.parametrize(("target", "dtype"), [("ort-cpu", "f32"), ("onnx", "f32"), ("ort-cuda", "f16")])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)], ids=str)
def test_offset_codes_are_multiplied_exactly(
    target: str, dtype: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    rng = np.random.default_rng(2)
    _, weight, recipe, source = as_stored(rng.standard_normal((64, 64)), Type.Q4_1, tmp_path)
    graph = Graph("product", source.reader)
    x = graph.add_input("x", TensorType(dtypes.parse(dtype), shape))
    w = graph.add_param("w", TensorType(dtypes.parse(dtype), (64, 64)), recipe)
    graph.add_output("y", ops.linear(x, w))
    KeepBlocks("quantized").run(graph, Trace())
    given = rng.standard_normal(shape).astype(dtypes.parse(dtype).numpy)
    backend = TARGETS.lookup(target)
    legalize(graph, backend.refusals)
    model = export.serialize_model(export.build_model(graph, backend, 16))
    found = onnxruntime.InferenceSession(model, onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"]).run(
        None, {"x": given}
    )[0]
    exact = given.astype(np.float64) @ weight.T
    np.testing.assert_allclose(found, exact, rtol=0, atol=(2e-6 if dtype == "f32" else 2e-3) * np.abs(exact).max())


def test_non_finite_scales_are_refused(tmp_path: Path) -> None:
    raw = quantize(np.ones((64, 64), np.float32), Type.Q4_1)
    raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1}, {"blk.0.attn_q.weight": raw})
    with pytest.raises(WeftError, match=r"a scale of blk\.0\.attn_q\.weight is not finite: fetch or save"):
        weft.compile(source, tmp_path / "out", weights="int4{method=auto}", passes="default")
    assert not (tmp_path / "out").exists()


def test_exports_have_the_blocks_of_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0})
    model = rewrite(load_source(str(source)), "quantize")
    weft.export(model, tmp_path / "again.gguf", weights="codes")
    first, second = (
        {t.name: (t.tensor_type, t.data.tobytes()) for t in GGUFReader(tmp_path / name).tensors}
        for name in ("model.gguf", "again.gguf")
    )
    assert first == second


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_expert_codes_are_kept(weights: str, save: Any, tmp_path: Path) -> None:
    model_type, config, metadata = SPARSE["qwen3moe"][0]
    _, folder = save(model_type, pad_token_id=0, **config)
    source = tmp_path / "model.gguf"
    write_gguf(source, folder, "qwen3moe", {}, False, metadata, Type.Q4_0 if weights == "int4" else Type.Q8_0)
    before, after = quantized(source, weights)
    kept = [name for name, p in after.params.items() if p.recipe.has(AsStored)]
    assert any(after.params[name].type.rank == 3 for name in kept)
    for name in kept:
        np.testing.assert_array_equal(
            after.params[name].recipe.evaluate(after.reader), before.params[name].recipe.evaluate(before.reader)
        )
    # In f32, because rounded activations may choose other experts.
    weft.compile(source, tmp_path / "out", weights=weights, arithmetic="f32")
    found = weft.load(tmp_path / "out").logits(IDS)[-1]
    exact = logits(after)[-1]
    np.testing.assert_allclose(found, exact, rtol=0, atol=5e-5 * np.abs(exact).max())


@pytest.mark.parametrize("arguments", ["group=64", "group=64, zeros=false", "bits=8"])
def test_integer_codes_of_a_folder_are_kept(arguments: str, save: Any, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2, hidden_size=64, intermediate_size=128)
    weft.export(rewrite(load_source(str(folder)), f"quantize{{method=rtn, {arguments}}}"), tmp_path / "hf")
    before, after = quantized(tmp_path / "hf", "int8" if "8" in arguments else "int4")
    for name in linear_maps(before):
        recipe = after.params[name].recipe
        assert recipe.has(AsStored)
        np.testing.assert_array_equal(recipe.evaluate(after.reader), before.params[name].recipe.evaluate(before.reader))
    _, finer = quantized(tmp_path / "hf", "int4{group=128}")
    assert not any(p.recipe.has(AsStored) for name, p in finer.params.items() if name in linear_maps(finer))


def test_model_folders_hold_the_codes(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0, "ffn_up": Type.Q4_0})
    model = rewrite(load_source(str(source)), "quantize")
    write_model(model, tmp_path / "folder")
    again = load_source(str(tmp_path / "folder")).graph
    for name in (*linear_maps(again), "embed.weight"):
        assert isinstance(again.params[name].recipe, Dequantize)
        np.testing.assert_array_equal(
            again.params[name].recipe.evaluate(again.reader),
            model.graph.params[name].recipe.evaluate(model.graph.reader),
        )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1], ids=lambda k: k.name)
def test_dequantized_floats_become_the_original_codes(kind: Type, dtype: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": kind, "token_embd": Type.Q8_0})
    weft.export(source, tmp_path / "hf", dtype=dtype, weights="float")
    before, after = quantized(tmp_path / "hf", "int4")
    _, kept = quantized(source, "int4")
    for name in linear_maps(before):
        assert after.params[name].recipe.has(OnGrid), name
        exact, found, same = (
            g.params[name].recipe.evaluate(g.reader).astype(np.float64) for g in (before, after, kept)
        )
        # As little is lost as from the file itself, but for what the floats have rounded off.
        blur = np.square(exact * {"f32": 2.0**-20, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]).mean()
        assert np.square(found - exact).mean() <= 1.1 * np.square(same - exact).mean() + blur
    embedding = after.params["embed.weight"].recipe
    assert embedding.has(BlockRecipe) and embedding.has(OnGrid) == (dtype != "bf16")


def test_head_has_the_requested_bits(tmp_path: Path) -> None:
    _, after = quantized(write(tmp_path / "model.gguf", {"": Type.Q4_0, "token_embd": Type.Q8_0}), "int4{head=4}")
    assert all(after.params[name].recipe.has(AsStored) for name in linear_maps(after))
    recipe = after.params["embed.weight"].recipe
    assert isinstance(recipe, Quantize) and recipe.bits == 4


def test_only_values_that_no_layout_represents_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0, "token_embd": Type.F16, "attn_output": Type.F16})
    weft.export(source, tmp_path / "hf", dtype="f16", weights="float")
    graph = load_source(str(tmp_path / "hf")).graph
    # A head of 8 bits is no reason to read a text.
    monkeypatch.setattr(pass_module, "read_tokens", lambda *_: pytest.fail("a text was read"))
    graph.tokenize = lambda text: [1] * 9999
    kept = run_passes(graph, 'quantize{keep="layers.*.attn.o.weight"}')
    assert kept.params["layers.0.ffn.down.weight"].recipe.has(OnGrid)
    assert kept.params["embed.weight"].recipe.has(Quantize)
    monkeypatch.undo()
    graph.tokenize = None
    both = run_passes(graph, "quantize")
    assert [n for n in linear_maps(both) if both.params[n].recipe.has(Quantize)] == [
        f"layers.{i}.attn.o.weight" for i in (0, 1)
    ]


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1], ids=lambda k: k.name)
def test_dequantized_file_round_trips(kind: Type, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": kind, "token_embd": Type.Q8_0})
    weft.export(source, tmp_path / "hf", dtype="f32", weights="float")
    weft.export(rewrite(load_source(str(tmp_path / "hf")), "quantize"), tmp_path / "again.gguf", weights="codes")
    first, second = (
        {t.name: (t.tensor_type, t.data.tobytes()) for t in GGUFReader(tmp_path / name).tensors}
        for name in ("model.gguf", "again.gguf")
    )
    assert first == second


@pytest.mark.parametrize("target", ["ort-cpu", "onnx", "torch"])
def test_folders_keep_representable_values(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    kinds = {"": Type.Q4_0, "token_embd": Type.Q8_0, "ffn_down": Type.Q4_1}
    weft.export(write(tmp_path / "model.gguf", kinds), tmp_path / "hf", dtype="f16", weights="float")
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, weights="int4", **options)
    exact = logits(quantized(tmp_path / "hf", "int4")[1])
    found = weft.load(tmp_path / "out", trust=target == "torch").logits(IDS)
    np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text())["blocks"]
    assert blocks.keys() == {"int4_32", "int8_32", "uint4_32_sums"}


@pytest.mark.parametrize(("group", "target"), by_turns([16, 32, 64, 128], ["ort-cpu", "onnx", "torch"]))
def test_real_zero_points_work_with_any_row_width(
    target: str, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 96 and 160 numbers are whole groups of 16 and 32 alone; in others zero points are integers."""
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    source = write(tmp_path / "model.gguf", {"": Type.F16}, dim=96, ffn=160, std=0.08)
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    weights = f"int4{{method=hqq, group={group}}}"
    weft.compile(source, tmp_path / "out", target=target, weights=weights, **options)
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text()).get("blocks", {})
    taken = group == 32 or (group == 16 and target != "torch")  # whose kernels take groups of 32 and more
    assert any("sums" in name for name in blocks) == taken
    exact = logits(quantized(source, weights)[1])
    found = weft.load(tmp_path / "out", trust=target == "torch").logits(IDS)
    np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
