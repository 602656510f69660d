"""Tensors of quantized folders, number by number against float64, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends import load_source
from weft.frontends.formats.hf import Folder
from weft.ir import WeftError
from weft.ir.recipes.readers import BlockTensorReader, TensorReader
from weft.ir.types.block_layouts import find_layout

from . import integer_checkpoints as checkpoints
from .integer_checkpoints import Array, Codes, draw
from .test_integer_folders import AWQ, GPTQ, compressed

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
INT8 = compressed(8, True, "int-quantized", strategy="channel")
FP8 = compressed(8, True, "float-quantized", type="float", block_structure=[16, 128])


def opened(folder: Path, how: dict[str, Any], tensors: dict[str, Array]) -> TensorReader:
    """The reader of a folder that holds `tensors` of a module x."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": how}))
    named = {f"x.{part}": np.ascontiguousarray(t) for part, t in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return Folder.open(folder).open_weights()


def same(reader: TensorReader, want: Array, ulps: int = 0) -> None:
    """Check all rows of x.weight, and rows that begin and end anywhere, against `want` in float64."""
    rows, exact = len(want), want.astype(np.float32)
    assert (list(reader.keys()), reader.shape("x.weight")) == (["x.weight"], want.shape)
    for start, stop in ((0, rows), (0, 1), (3, 4), (5, rows - 2)):
        found = reader.read("x.weight", start, stop)
        assert found.dtype == np.float32 and found.shape == want[start:stop].shape
        np.testing.assert_array_max_ulp(found, exact[start:stop], ulps) if ulps else np.testing.assert_array_equal(
            found, exact[start:stop]
        )


def blocks(reader: TensorReader) -> Array:
    """The numbers of the blocks of x.weight, by their layout."""
    layout = find_layout(reader.dtype("x.weight"))
    assert layout is not None and isinstance(reader, BlockTensorReader)
    rows = reader.shape("x.weight")[0]
    return layout.dequantize(layout.unpack(reader.read_blocks("x.weight", 0, rows)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 96])
def test_gptq_act_order_is_dequantized(bits: int, group: int, tmp_path: Path) -> None:
    """Inputs in any group; such codes have no layout, so that compilers get their numbers."""
    w = draw(64, 96, bits, group, act_order=group < 96)
    reader = opened(tmp_path, GPTQ | {"bits": bits, "group_size": group, "desc_act": True}, checkpoints.gptq(w))
    same(reader, w.numbers)
    assert (find_layout(reader.dtype("x.weight")) is None) == (group < 96)


def test_gptq_zero_point_0_borrows_from_its_word(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from every zero point of a word at once; 0 becomes 15, and its neighbour one less."""
    w = draw(64, 96)
    zeros = np.zeros_like(w.zeros)
    zeros[1::2] = 15
    w = Codes(4, w.codes, w.scales, zeros, w.index)
    tensors = checkpoints.gptq(w)
    assert set(tensors["qzeros"].view(np.uint8).reshape(-1).tolist()) == {0xF0 - 0x11}
    same(opened(tmp_path, GPTQ, tensors), w.numbers)


@pytest.mark.parametrize(("group", "layout"), [(-1, "uint4_64"), (24, "uint4_24"), (12, None), (48, "uint4_16")])
def test_groups_are_converted_to_sizes_of_kernels(group: int, layout: str | None, tmp_path: Path) -> None:
    width = 192
    w = draw(32, width, group=width if group == -1 else group)
    reader = opened(tmp_path, GPTQ | {"group_size": group}, checkpoints.gptq(w))
    same(reader, w.numbers)
    if layout is None:
        assert find_layout(reader.dtype("x.weight")) is None
        return
    assert str(reader.dtype("x.weight")) == layout
    np.testing.assert_array_equal(blocks(reader), w.numbers)


def test_modules_may_override_bits(tmp_path: Path) -> None:
    """`dynamic` of GPTQModel: patterns of modules with other settings."""
    w = draw(64, 96, 8, 48)
    same(opened(tmp_path, GPTQ | {"dynamic": {"+:x": {"bits": 8, "group_size": 48}}}, checkpoints.gptq(w)), w.numbers)


@pytest.mark.parametrize(
    ("file", "names"), [("quantize_config.json", "bits group_size"), ("quant_config.json", "w_bit q_group_size")]
)
def test_first_gptq_folders_have_a_separate_config_file(file: str, names: str, tmp_path: Path) -> None:
    w = draw(64, 96)
    pack, how = (checkpoints.awq, AWQ) if "w_bit" in names else (checkpoints.gptq, GPTQ)
    opened(tmp_path, how, pack(w))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(dict(zip(names.split(), (4, 32), strict=True))))
    folder = Folder.open(tmp_path)
    same(folder.open_weights(), w.numbers)
    assert tmp_path / file in folder.files


@pytest.mark.parametrize("rows", [64, 40, 8])
def test_awq_is_dequantized(rows: int, tmp_path: Path) -> None:
    w = draw(rows, 96, group=96)
    reader = opened(tmp_path, AWQ | {"group_size": -1}, checkpoints.awq(w))
    same(reader, w.numbers)
    np.testing.assert_array_equal(blocks(reader), w.numbers)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("whole_codes", [False, True], ids=["stream", "words"])
@pytest.mark.parametrize(("symmetric", "act_order"), [(True, False), (False, False), (False, True)])
def test_pack_quantized_is_dequantized(
    bits: int, whole_codes: bool, symmetric: bool, act_order: bool, tmp_path: Path
) -> None:
    """Words end within codes, or with whole ones; so do those of the zero points of 36 outputs."""
    w = draw(36, 96, bits, 12, symmetric, act_order, "f32")
    tensors = checkpoints.pack_quantized(w, symmetric, whole_codes)
    same(opened(tmp_path, compressed(bits, symmetric), tensors), w.numbers)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_blocks_are_dequantized(bits: int, symmetric: bool, tmp_path: Path) -> None:
    w = draw(36, 96, bits, 96, symmetric, scale="bf16")
    reader = opened(tmp_path, compressed(bits, symmetric), checkpoints.pack_quantized(w, symmetric))
    assert str(reader.dtype("x.weight")) == f"{'' if symmetric else 'u'}int{bits}_32_bf16"
    np.testing.assert_array_equal(blocks(reader), w.numbers)


@pytest.mark.parametrize("zeros", [None, 0, 5], ids=str)
@pytest.mark.parametrize("shape", [(1,), (), (1, 1), (20, 1), (20, 4)], ids=str)
def test_byte_integers_are_dequantized(shape: tuple[int, ...], zeros: int | None, tmp_path: Path) -> None:
    """One scale for all, for each row, or for each group of a row."""
    rng = np.random.default_rng(4)
    codes, scales = rng.integers(-128, 128, (20, 64), np.int8), rng.uniform(0.01, 0.02, shape).astype(np.float32)
    points = None if zeros is None else rng.integers(-zeros, zeros + 1, shape).astype(np.int8)
    tensors: dict[str, Array] = {"weight": codes, "weight_scale": np.asarray(scales)}
    tensors |= {} if points is None else {"weight_zero_point": np.asarray(points)}
    groups = shape[1] if len(shape) == 2 else 1
    steps, shifts = (
        np.broadcast_to(np.asarray(t, np.float64).reshape(-1, groups), (20, groups)).repeat(64 // groups, 1)
        for t in (scales, np.zeros(shape) if points is None else points)
    )
    want = (codes.astype(np.float64) - shifts) * steps
    reader = opened(tmp_path, INT8, tensors)
    same(reader, want)
    np.testing.assert_array_equal(blocks(reader), want.astype(np.float32))


@pytest.mark.parametrize("shape", [(1,), (20, 1), (2, 2), (20, 2)], ids=str)
def test_byte_floats_are_dequantized(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One scale for all, for each row, for each tile of 16 · 128 (the last is cut), or for each group of a row."""
    rng = np.random.default_rng(4)
    codes = rng.normal(0, 40, (20, 256)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.01, 0.02, shape).astype(np.float32)
    tall, wide = (16 if shape[0] == 2 else -(-20 // shape[0])), 256 // (1 if len(shape) == 1 else shape[1])
    each = scales.reshape(shape[0], -1).astype(np.float64).repeat(tall, 0)[:20].repeat(wide, 1)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    reader = opened(tmp_path, FP8, tensors)
    same(reader, codes.astype(np.float64) * each)
    np.testing.assert_array_equal(blocks(reader), (codes.astype(np.float64) * each).astype(np.float32))


NF4 = [  # QLoRA (arXiv 2305.14314), appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def in_nf4(rows: int, width: int, nested: bool, kind: str = "nf4") -> tuple[dict[str, Array], Array]:
    """The tensors of a weight of bitsandbytes in blocks of 64, and its numbers in float64."""
    rng = np.random.default_rng(9)
    count = rows * width
    blocks = -(-count // 64)
    codes, table = rng.integers(0, 16, count + count % 2), np.array(NF4, np.float32)
    tensors: dict[str, Array] = {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": table,
    }
    facts: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": [rows, width]}
    if nested:
        tensors["weight.absmax"] = rng.integers(0, 256, blocks).astype(np.uint8)
        tensors["weight.nested_absmax"] = rng.uniform(0.1, 0.2, -(-blocks // 4)).astype(np.float32)
        tensors["weight.nested_quant_map"] = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        facts |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.75}
        steps = tensors["weight.nested_quant_map"][tensors["weight.absmax"]].astype(np.float64)
        scales = steps * tensors["weight.nested_absmax"].astype(np.float64).repeat(4)[:blocks] + 0.75
    else:
        tensors["weight.absmax"] = rng.uniform(0.5, 1, blocks).astype(np.float32)
        scales = tensors["weight.absmax"].astype(np.float64)
    text = json.dumps(facts).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
    numbers = table.astype(np.float64)[codes][:count] * scales.repeat(64)[:count]
    return tensors, numbers.reshape(rows, width)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (17, 40), (21, 33)], ids=str)
def test_bitsandbytes_is_dequantized(shape: tuple[int, int], nested: bool, tmp_path: Path) -> None:
    """Rows that begin within a block, and within a byte; scales that are rounded twice, and a product once more."""
    tensors, want = in_nf4(*shape, nested)
    reader = opened(tmp_path, BNB, tensors)
    same(reader, want, ulps=3 if nested else 0)
    assert str(reader.dtype("x.weight")) == "nf4"


def test_llm_int8_is_dequantized(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes, largest = rng.integers(-127, 128, (20, 64), np.int8), rng.uniform(1, 2, 20).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    reader = opened(tmp_path, {"load_in_8bit": True}, tensors)
    want = codes * largest.astype(np.float64)[:, None] / 127
    same(reader, want, ulps=2)
    np.testing.assert_array_equal(blocks(reader), reader.read("x.weight", 0, 20))


LAYER = checkpoints.gptq(draw(64, 96))
WORDS = checkpoints.pack_quantized(draw(64, 96))
TABLE, _ = in_nf4(32, 64, True)
BYTES: dict[str, Array] = {"weight": np.zeros((8, 32), np.int8), "weight_scale": np.ones((8, 1), np.float32)}
STATE = "weight.quant_state.bitsandbytes__nf4"


def without(tensors: dict[str, Array], *names: str) -> dict[str, Array]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def text(**facts: Any) -> dict[str, Array]:
    return TABLE | {STATE: np.frombuffer(json.dumps(facts).encode(), np.uint8)}


@pytest.mark.parametrize(
    ("how", "tensors", "message"),
    [
        (GPTQ | {"bits": 5}, LAYER, r"gptq: bits=5 is not supported, only 2, 3, 4, 8"),
        (GPTQ | {"bits": True}, LAYER, "bits=True is not supported"),
        (
            GPTQ | {"bits": 8},
            LAYER,
            r"x.qweight i32 \[12, 64\], x.scales f16 \[3, 64\] and x.qzeros .* i32 \[in · 8 / 32, out\]",
        ),
        (GPTQ | {"group_size": 48}, LAYER, r"qweight must be .* scales .* \[in / 48"),
        (GPTQ | {"group_size": 0}, LAYER, "group_size=0 must be a positive integer, or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, LAYER, "checkpoint_format='marlin' is not supported, only 'gptq' and"),
        (GPTQ, without(LAYER, "scales"), "there is no 'x.scales' next to 'x.qweight'; the checkpoint is incomplete"),
        (GPTQ, without(LAYER, "qzeros"), "there is no 'x.qzeros' next to 'x.qweight'"),
        (GPTQ | {"desc_act": True}, without(LAYER, "g_idx"), "there is no 'x.g_idx' next to 'x.qweight'"),
        (GPTQ, LAYER | {"scales": LAYER["scales"][:2]}, r"x.scales f16 \[2, 64\] and"),
        (GPTQ, LAYER | {"scales": LAYER["scales"].astype(np.int32)}, r"x.scales i32 \[3, 64\] and"),
        (GPTQ, LAYER | {"qzeros": LAYER["qzeros"][:, :4]}, r"x.qzeros i32 \[3, 4\] do not"),
        (GPTQ, LAYER | {"qweight": LAYER["qweight"][0]}, r"x.qweight i32 \[64\], "),
        (GPTQ, LAYER | {"g_idx": LAYER["g_idx"][:5]}, r"'x.g_idx' must hold the group of each of 96 inputs"),
        (GPTQ, LAYER | {"g_idx": LAYER["g_idx"] + 1}, "'x.g_idx' holds groups 1 to 3, but must hold groups 0 to 2"),
        (AWQ | {"bits": 8}, LAYER, r"awq: bits=8 is not supported, only 4"),
        (AWQ | {"version": "gemv"}, LAYER, "version='gemv' is not supported, only 'gemm'"),
        (AWQ, LAYER, r"qweight must be i32 \[in, out / 8\], scales f16, bf16 or f32 \[in / 32, out\]"),
        (AWQ, without(LAYER, "qzeros"), "there is no 'x.qzeros' next to 'x.qweight'"),
        (compressed(4, False) | {"config_groups": {}}, WORDS, "config_groups must map at least one group"),
        (compressed(9, False), WORDS, "num_bits=9 of config group 'group_0' must be an integer from 2 to 8"),
        (compressed(4, False, "marlin-24"), WORDS, "format='marlin-24' is not supported, only pack-quantized, int-q"),
        (compressed(4, False) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, WORDS, "only 'dense'"),
        (compressed(4, False) | {"transform_config": {"config_groups": {"R1": {}}}}, WORDS, "rotates activations"),
        (compressed(8, False), WORDS, r"x.weight_packed i32 \[64, 12\], .* packed from 8 bits for a \[64, 96\] matrix"),
        (
            compressed(4, False),
            without(WORDS, "weight_scale"),
            "there is no 'x.weight_scale' next to 'x.weight_packed'",
        ),
        (
            compressed(4, False),
            without(WORDS, "weight_shape"),
            "there is no 'x.weight_shape' next to 'x.weight_packed'",
        ),
        (compressed(4, False), without(WORDS, "weight_packed"), "'x.weight' is missing, whose scale is"),
        (compressed(4, False), WORDS | {"weight_shape": np.array([64, 99])}, r"4 bits for a \[64, 99\] matrix"),
        (
            compressed(4, False),
            WORDS | {"weight_shape": np.array([64])},
            "'x.weight_shape' must hold two positive integers",
        ),
        (
            compressed(4, False),
            WORDS | {"weight_zero_point": WORDS["weight_zero_point"][:3]},
            r"zero_point i32 \[3, 3\]",
        ),
        (
            compressed(4, False),
            WORDS | {"weight_g_idx": np.full(96, 9, np.int32)},
            "holds groups 9 to 9, but must hold groups 0 to 2",
        ),
        (INT8, without(BYTES, "weight_scale"), "there is no 'x.weight_scale' next to 'x.weight'"),
        (INT8, BYTES | {"weight_scale": np.ones((3, 1), np.float32)}, "where groups divides"),
        (INT8, BYTES | {"weight_zero_point": np.ones((4, 1), np.int8)}, "must have the shape of the scales"),
        (
            INT8,
            BYTES | {"weight": np.zeros((8, 32), np.float32)},
            "'x.weight' is f32, but its scale needs i8 or f8e4m3",
        ),
        (BNB, without(TABLE, "weight.absmax"), "there is no 'x.weight.absmax' next to 'x.weight'"),
        (BNB, without(TABLE, "weight.nested_quant_map"), "there is no 'x.weight.nested_quant_map' next to 'x.weight'"),
        (BNB, without(TABLE, STATE), "'x.weight.quant_map' has no quant_state tensor next to it"),
        (BNB, without(TABLE, "weight"), "there is no 'x.weight' next to 'x.weight.quant_state.bitsandbytes__nf4'"),
        (BNB, TABLE | {STATE: np.frombuffer(b"{", np.uint8)}, "the JSON in 'x.weight.quant_state.* not valid JSON"),
        (BNB, text(shape=[32, 64]), "has no valid shape and block size: shape=.32, 64., blocksize=None"),
        (BNB, text(shape=[32, -64], blocksize=64), "has no valid shape and block size: shape=.32, -64."),
        (BNB, text(shape=[32, 64], blocksize=64), "no valid nested_blocksize and nested_offset for"),
        (
            BNB,
            text(shape=[32, 32], blocksize=64, nested_blocksize=4, nested_offset=0),
            r"codes must be u8 \[512, 1\], absmax ",
        ),
        (BNB, {"weight": BYTES["weight"], "SCB": np.ones(7, np.float32)}, r"x.SCB f32 \[7\] do not fit together"),
        (BNB, {"SCB": np.ones(7, np.float32)}, "there is no 'x.weight' next to 'x.SCB'"),
        (
            BNB,
            {"weight": BYTES["weight"], "SCB": np.ones(8, np.float32), "weight_format": np.ones((), np.uint8)},
            "'x.weight' is not stored row by row, as 'x.weight_format' states",
        ),
    ],
)
def test_mismatched_quantized_tensors_are_refused(
    how: Any, tensors: dict[str, Array], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeftError, match=message) as e:
        opened(tmp_path, how, tensors)
    assert str(e.value).startswith(f"{tmp_path / 'config.json'}: cannot read weights quantized by ")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("how", "tensors", "key"),
    [
        (GPTQ, LAYER, "x.scales"),
        (AWQ, checkpoints.awq(draw(64, 96)), "x.scales"),
        (compressed(4, False), WORDS, "x.weight_scale"),
        (INT8, BYTES, "x.weight_scale"),
        (BNB, in_nf4(32, 64, False)[0], "x.weight.absmax"),
    ],
)
def test_non_finite_scales_are_named(how: Any, tensors: dict[str, Array], key: str, tmp_path: Path) -> None:
    name = key.removeprefix("x.")
    scales = tensors[name].copy()
    scales.reshape(-1)[1] = np.inf
    reader = opened(tmp_path, how, tensors | {name: scales})
    with pytest.raises(WeftError, match=f"a scale in '{key}' is not finite; the checkpoint is damaged"):
        reader.read("x.weight", 0, reader.shape("x.weight")[0])


def test_weights_without_blocks_are_refused_with_a_reason(tmp_path: Path) -> None:
    tensors, _ = in_nf4(32, 64, False)
    reader = opened(tmp_path, BNB, tensors)
    assert isinstance(reader, BlockTensorReader)
    with pytest.raises(WeftError, match=r"'x\.weight' has no block layout that can be read as stored"):
        reader.read_blocks("x.weight", 0, 1)


def test_unknown_quantized_tensors_are_named(tmp_path: Path) -> None:
    """Parts of quantized weights are read with them; others are listed as before."""
    folder, _, _ = checkpoints.model(tmp_path, GPTQ, checkpoints.gptq)
    extra = {"model.layers.0.mlp.down_proj.odd": np.ones(3, np.float32)}
    checkpoints.save(tmp_path / "more", extra | _quantized(folder), GPTQ)
    assert load_source(tmp_path / "more").unread == list(extra)


def _quantized(folder: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return {key: t for key, t in load_file(folder / "model.safetensors").items() if "_proj" in key}
