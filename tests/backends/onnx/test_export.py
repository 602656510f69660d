"""The ONNX backend: selection of lowerings, traces, streamed weights, configs."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import weft
from weft import MLP, Attention, Block, Decoder, Encoder, GatedMLP, RMSNorm, RoPE
from weft.backends.onnx import export
from weft.backends.onnx.lowering import LOWERINGS, list_refusals, select_lowerings
from weft.backends.target import TARGETS
from weft.ir import OPS, Graph, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Full, Normal
from weft.ir.recipes import recipe as recipe_module
from weft.ir.recipes.blocks import Quantize
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, legalize, run_passes
from weft.passes.core.equivalence import EquivalenceCheck

from ...passes.zoo import ZOO


def decoder(heads: int = 4, kv_heads: int = 2, dim: int = 64, tie: bool = True) -> Decoder:
    attention = Attention(heads=heads, kv_heads=kv_heads, rope=RoPE(10_000))
    return Decoder(
        vocab=96,
        dim=dim,
        layers=2,
        block=Block(attention, GatedMLP(80), norm=RMSNorm(1e-5)),
        tie_embeddings=tie,
        context=64,
    )


def op_types(path: Path) -> list[str]:
    return [n.op_type for n in onnx.load(path / "model.onnx", load_external_data=False).graph.node]


def test_every_lowering_names_an_op_and_known_targets() -> None:
    for name, found in LOWERINGS.items():
        assert name in OPS
        assert all(any(low.targets(target) for target in TARGETS.values() if target.opset) for low in found)


def test_unknown_targets_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="did you mean ort-cpu"):
        TARGETS.lookup("ort_cpu")
    with pytest.raises(WeftError, match="does not support bf16"):
        weft.compile(decoder(), tmp_path / "out", target="ort-cpu", dtype="bf16")
    with pytest.raises(WeftError, match=r"unknown dtype 'f12'; known are f32, f16$"):
        weft.compile(decoder(), tmp_path / "out", dtype="f12")
    with pytest.raises(WeftError, match="max-length"):
        weft.compile(decoder(), tmp_path / "out", max_length=0)
    assert list(tmp_path.iterdir()) == []


def test_attention_takes_the_shared_cache_kernel_where_it_fits_and_says_why_not(tmp_path: Path) -> None:
    fits = weft.compile(decoder(), tmp_path / "fits")
    assert fits.trace == []
    assert op_types(tmp_path / "fits").count("GroupQueryAttention") == 2
    assert not {"RotaryEmbedding", "Split"} & set(op_types(tmp_path / "fits"))  # absorbed
    odd = weft.compile(decoder(dim=48), tmp_path / "odd")  # heads of 12
    assert "Attention" in op_types(tmp_path / "odd")
    assert any("GroupQueryAttention refused: head sizes 12 and 12" in line for line in odd.trace)


def test_rotary_positions_are_absorbed_only_when_the_kernel_can_turn_them(tmp_path: Path) -> None:
    weft.compile(decoder(dim=32), tmp_path / "small")  # heads of 8: four pairs, not a multiple of eight
    kinds = op_types(tmp_path / "small")
    assert kinds.count("GroupQueryAttention") == 2
    assert kinds.count("RotaryEmbedding") == 4


def test_positions_turned_in_other_heads_are_not_absorbed() -> None:
    """A rotation of half as many, twice as wide heads is another function than the kernel's."""
    graph = run_passes(decoder().graph(), "default")
    (rope,) = [n for n in graph.nodes if n.op is ops.rope and n.output.name == "layers.1.attn.q_rope"]
    wide = graph.add_param("wide", TensorType(dtypes.f32, (8,)), Full(0.1, (8,)))
    for node in [n for n in graph.nodes if n.op is ops.rope and n.scope == rope.scope]:
        node.set_input(2, wide)
    rope.attrs["heads"] = 2
    chosen = select_lowerings(graph, TARGETS["ort-cpu"]).chosen
    assert [n.scope for n in chosen if n.op is ops.rope] == ["layers.1.attn"] * 2


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    for target in ("ort-cpu", "onnx"):
        tied = weft.compile(decoder(tie=True), tmp_path / f"tied-{target}", target=target)
        untied = weft.compile(decoder(tie=False), tmp_path / f"untied-{target}", target=target)
        assert untied.weight_bytes - tied.weight_bytes == 96 * 64 * 4
        stored = (tmp_path / f"tied-{target}" / "model.onnx.data").stat().st_size
        assert tied.weight_bytes <= stored + 16 * export.INLINE_BYTES


def test_an_op_that_nothing_lowers_is_named_with_each_refusal() -> None:
    graph = Graph("odd")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3)))
    graph.add_output("y", ops.add(x, x))
    (node,) = graph.nodes
    place = TARGETS["ort-cpu"]
    saved = LOWERINGS["add"]
    LOWERINGS.remove("add")
    try:
        assert list_refusals(node, place) == ["no lowering is registered"]
        with pytest.raises(WeftError, match="ort-cpu cannot run add in the model: no lowering is registered"):
            select_lowerings(graph, place)
    finally:
        LOWERINGS.add("add", saved)


def test_symbolic_sizes_are_computed_where_reshape_cannot_copy_them() -> None:
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    graph = Graph("shapes")
    x = graph.add_input("x", TensorType(dtypes.f32, (batch, seq, 4)))
    graph.add_output("joined", ops.reshape(x, shape=(2 * batch, seq, 2)))
    graph.add_output("wide", ops.expand(ops.reshape(x, shape=(1, batch * seq * 4)), shape=(seq + 1, 4 * batch * seq)))
    model = export.serialize_model(export.build_model(graph, TARGETS["onnx"], 8))
    feed = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    joined, wide = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": feed})
    np.testing.assert_array_equal(joined, feed.reshape(4, 3, 2))
    np.testing.assert_array_equal(wide, np.broadcast_to(feed.reshape(1, -1), (4, 24)))


def test_inputs_and_parameters_may_be_outputs() -> None:
    graph = Graph("through")
    x = graph.add_input("x", TensorType(dtypes.f32, (3,)))
    graph.add_output("same", x)
    graph.add_output("again", x)
    graph.add_output("fixed", graph.add_param("p", TensorType(dtypes.f32, (2,)), Full(1.5, (2,))))
    graph.add_output("doubled", ops.add(x, x, name="doubled"))
    model = export.serialize_model(export.build_model(graph, TARGETS["onnx"], 8))
    got = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": np.ones(3, np.float32)})
    assert [a.tolist() for a in got] == [[1, 1, 1], [1, 1, 1], [1.5, 1.5], [2, 2, 2]]


@pytest.mark.parametrize("name", ["family/llama-gqa-tied", "family/gemma2", "family/bert", "cached/family mistral-gqa"])
def test_operators_that_an_older_opset_lacks_are_expanded(name: str) -> None:
    graph = ZOO[name]()
    old = replace(TARGETS["onnx"], name="older", opset=21, ir_version=10)
    legalize(graph, partial(list_refusals, target=old), Trace())
    model = onnx.load_from_string(export.serialize_model(export.build_model(graph, old, 16)))
    onnx.checker.check_model(model, full_check=True)
    assert [o.version for o in model.opset_import] == [21]
    feeds = EquivalenceCheck().make_inputs(graph)
    want = interpret(graph, feeds)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kinds = {i.name: i.type for i in session.get_inputs()}
    given = {n: a.astype(np.float32 if "float" in kinds[n] else np.int64) for n, a in feeds.items()}
    for output, value in zip(session.get_outputs(), session.run(None, given), strict=True):
        np.testing.assert_allclose(value, want[output.name], rtol=1e-3, atol=1e-4 * np.abs(want[output.name]).max())


def test_an_operator_that_the_opset_lacks_is_an_error() -> None:
    graph = Graph("norm")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3)))
    graph.add_output("y", ops.gelu(x, approximate="none"))
    with pytest.raises(WeftError, match="target oldest has opset 19, which has no operator Gelu"):
        export.build_model(graph, replace(TARGETS["onnx"], name="oldest", opset=19), 8)


def test_weights_are_written_in_blocks_aligned_and_equal(tmp_path: Path) -> None:
    graph = Graph("big")
    x = graph.add_input("x", TensorType(dtypes.f32, (1, 2048)))
    recipe = Normal((700, 2048), 0.02, "w")  # three blocks
    weight = graph.add_param("w", TensorType(dtypes.f32, (700, 2048)), recipe)
    graph.add_output("y", ops.linear(x, weight))
    steps: list[int] = []
    export.write_models({export.MODEL: export.build_model(graph, TARGETS["ort-cpu"], 8)}, tmp_path, steps.append)
    assert len(steps) == 3
    assert sum(steps) == (tmp_path / "model.onnx.data").stat().st_size == 700 * 2048 * 4
    stored = np.fromfile(tmp_path / "model.onnx.data", np.float32).reshape(700, 2048)
    np.testing.assert_array_equal(stored, recipe.evaluate(graph.reader))
    weft.compile(decoder(dim=256), tmp_path / "aligned")
    for tensor in onnx.load(tmp_path / "aligned" / "model.onnx", load_external_data=False).graph.initializer:
        facts = {e.key: e.value for e in tensor.external_data}
        if facts:
            align = export.PAGE if int(facts["length"]) >= 16 * export.PAGE else 64
            assert int(facts["offset"]) % align == 0


@pytest.mark.parametrize(("target", "writes"), [("ort-cpu", 3 * 3), ("onnx", 11 + 1 + 2)])
def test_quantized_weights_are_what_their_recipes_make(
    target: str, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ort-cpu in blocks of all parts; for onnx transposed, as 4-bit integers in blocks of an odd number."""
    monkeypatch.setattr(recipe_module, "SWEEP_ELEMENTS", 99 * 2001)
    graph = Graph("big")
    x = graph.add_input("x", TensorType(dtypes.f32, (1, 999)))
    recipe = Quantize(Normal((2001, 999), 0.02, "w"), 4, 32)  # rows end within a group
    weight = graph.add_param("w", TensorType(dtypes.f32, (2001, 999)), recipe)
    graph.add_output("y", ops.linear(x, weight))
    built = export.build_model(graph, TARGETS.lookup(target), 8)
    steps: list[int] = []
    export.write_models({export.MODEL: built}, tmp_path, steps.append)
    assert len(steps) == writes and sum(steps) == export.count_weight_bytes([built])
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for name, tensor in export.list_stored_tensors([built]).items():
        whole = tensor.recipe.evaluate(graph.reader)
        np.testing.assert_array_equal(stored[name].astype(whole.dtype), whole, name)


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))
    with pytest.raises(WeftError, match="disk is full"):
        weft.compile(decoder(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weft.compile(decoder(), tmp_path / "out")
    before = (tmp_path / "out" / "model.onnx").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "_iter_cast_blocks", fail)
    with pytest.raises(WeftError, match="disk is full"):
        weft.compile(decoder(heads=2), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.onnx").read_bytes() == before


def test_the_folder_describes_itself(tmp_path: Path) -> None:
    weft.compile(decoder(), tmp_path / "out", target="ort-cuda", dtype="bf16", max_length=32)
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert (manifest["kind"], manifest["target"], manifest["dtype"]) == ("decoder", "ort-cuda", "bf16")
    assert (manifest["vocab"], manifest["max_length"], manifest["logits"]) == (96, 32, "last")
    wide = {"kv_heads": 2, "head_dim": 16, "window": None, "rolling": False, "capacity": None, "latent": False}
    assert manifest["cache"] == [{"layer": i, **wide} for i in range(2)]
    assert "kv-cache" in manifest["pipeline"]
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["type"] == "decoder"
    assert config["search"]["past_present_share_buffer"] is True
    assert config["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]


def packed_entries(folder: Path) -> list[tuple[str, int, int]]:
    """(tensor, offset, length) of every block that ONNX Runtime packed ahead."""
    found = []
    for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked_"):
                offset, length, *_ = entry.value.rsplit("|", 1)[1].split(";")
                found.append((tensor.name, int(offset), int(length)))
    return found


def test_packed_weights_stand_in_the_file_and_are_used(tmp_path: Path) -> None:
    model, ids = decoder(dim=1024), [5, 9, 2, 77, 31]
    weft.compile(model, tmp_path / "plain")
    weft.compile(model, tmp_path / "packed", prepack=True)
    assert packed_entries(tmp_path / "plain") == []
    entries = packed_entries(tmp_path / "packed")
    assert {name for name, *_ in entries} >= {"layers.0.attn.qkv.weight", "layers.1.ffn.down.weight", "embed.weight"}
    assert any(length >= 2 << 20 for *_, length in entries)
    assert all(offset % (2 << 20 if length >= 2 << 20 else 4096) == 0 for _, offset, length in entries)
    want = weft.load(tmp_path / "plain").logits(ids)
    np.testing.assert_array_equal(weft.load(tmp_path / "packed").logits(ids), want)
    assert sorted(p.name for p in (tmp_path / "packed").iterdir()) == sorted(
        p.name for p in (tmp_path / "plain").iterdir()
    )
    _, offset, length = next(e for e in entries if e[0] == "layers.0.attn.qkv.weight")
    with (tmp_path / "packed" / "model.onnx.data").open("r+b") as file:
        file.seek(offset)
        file.write(bytes(length))
    if tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32):  # it compares what its kernels pack
        with pytest.raises(WeftError, match="that --prepack stored are damaged: compile again"):
            weft.load(tmp_path / "packed")
    else:
        assert np.abs(weft.load(tmp_path / "packed").logits(ids) - want).max() > 1e-3


def test_packing_of_another_processor_is_not_used(tmp_path: Path) -> None:
    """Its hash differs from what the kernels pack here; then they keep their own, whatever the file holds."""
    ids = [5, 9, 2, 77, 31]
    weft.compile(decoder(dim=256), tmp_path / "out", prepack=True)
    want = weft.load(tmp_path / "out").logits(ids)
    path = tmp_path / "out" / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked_"):
                kernel, _, where = entry.value.replace("|", "+", 1).split("+", 2)
                entry.value = f"{kernel}+1234567890|{where}"
    onnx.save(proto, path)
    for _, offset, length in packed_entries(tmp_path / "out"):
        with (tmp_path / "out" / "model.onnx.data").open("r+b") as file:
            file.seek(offset)
            file.write(bytes(length))
    np.testing.assert_array_equal(weft.load(tmp_path / "out").logits(ids), want)


def test_packing_that_fails_is_told_in_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ort.capi.onnxruntime_pybind11_state.Fail("write failed:\nNo space left on device")

    monkeypatch.setattr(ort, "InferenceSession", full)
    with pytest.raises(WeftError, match=r"could not pack the weights .*No space left.*disk space"):
        weft.compile(decoder(), tmp_path / "out", prepack=True)
    assert list(tmp_path.iterdir()) == []


def test_small_weights_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="--prepack has no effect here, so leave it out: ONNX Runtime packs none"):
        weft.compile(decoder(dim=8), tmp_path / "out", prepack=True)
    assert list(tmp_path.iterdir()) == []


def test_packing_is_for_ort_cpu_only(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="--prepack supports target ort-cpu only"):
        weft.compile(decoder(), tmp_path / "out", target="onnx", prepack=True)


def test_an_encoder_in_bf16_hands_out_f32(tmp_path: Path) -> None:
    encoder = Encoder(vocab=96, dim=64, layers=1, block=Block(Attention(heads=4, causal=False), MLP(80)), context=32)
    weft.compile(encoder, tmp_path / "out", target="ort-cuda", dtype="bf16")
    (output,) = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_every_pass_of_the_default_pipeline_fires_on_a_plain_decoder() -> None:
    from weft.passes import Report

    report = Report()
    run_passes(decoder(tie=False).graph(), "default", report=report, verify=True)
    fired = {r.applied.name: r.rewrites for r in report.records}
    for name in ("pack-qkv", "pack-gate-up", "fuse-residual-norm", "kv-cache", "last-token-logits"):
        assert fired[name] > 0, fired
