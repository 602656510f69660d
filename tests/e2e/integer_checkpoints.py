"""Tiny Llamas in the formats of GPTQ, AWQ, compressed-tensors, bitsandbytes and torchao, packed as published.

Nothing of weft packs here. A stream of codes is one large Python integer; loops follow the packers of AutoGPTQ and
AutoAWQ. Weights are random codes: what they stand for is computed in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
VOCAB, DIM, FFN, LAYERS = 96, 64, 128, 2
SCALES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


@dataclass(frozen=True)
class Codes:
    """A weight [out, in]: scales · (codes − zeros), each input in its group; codes and zeros from 0 to 2^bits − 1."""

    bits: int
    codes: Array
    scales: Array  # [out, groups]
    zeros: Array
    index: Array  # [in]

    @property
    def numbers(self) -> Array:
        """The numbers in float64."""
        steps = self.codes.astype(np.float64) - self.zeros[:, self.index]
        return steps * self.scales.astype(np.float64)[:, self.index]


def draw(
    rows: int,
    width: int,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    scale: str = "f16",
    seed: int = 0,
) -> Codes:
    """Random codes of matrices of ordinary size."""
    rng = np.random.default_rng(seed)
    groups = width // group
    zeros = np.full((rows, groups), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (rows, groups))
    index = np.arange(width) // group
    return Codes(
        bits,
        rng.integers(0, 1 << bits, (rows, width)),
        (rng.uniform(0.5, 1, (rows, groups)) * 0.3 / (1 << (bits - 1))).astype(SCALES[scale]),
        zeros,
        rng.permutation(index) if act_order else index,
    )


def stream(codes: Array, bits: int) -> Array:
    """Rows of `codes` [rows, n] as words, i32 [rows, ⌈n · bits / 32⌉]: code i from bit i · bits of a row on."""
    words = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (bits * i) for i, code in enumerate(row)).to_bytes(4 * words, "little") for row in codes]
    return np.frombuffer(b"".join(rows), "<i4").reshape(len(codes), words)


def _three_bits(codes: Array) -> Array:
    """Codes of 3 bits [32 · n, out] in words [3 · n, out], by the steps of AutoGPTQ's packer."""
    words = np.zeros((len(codes) // 32 * 3, codes.shape[1]), np.uint32)
    i = row = 0
    codes = codes.astype(np.uint32)
    while row < len(words):
        for j in range(i, i + 10):
            words[row] |= codes[j] << (3 * (j - i))
        i += 10
        words[row] |= codes[i] << 30
        row += 1
        words[row] |= (codes[i] >> 2) & 1
        i += 1
        for j in range(i, i + 10):
            words[row] |= codes[j] << (3 * (j - i) + 1)
        i += 10
        words[row] |= codes[i] << 31
        row += 1
        words[row] |= (codes[i] >> 1) & 3
        i += 1
        for j in range(i, i + 10):
            words[row] |= codes[j] << (3 * (j - i) + 2)
        i += 10
        row += 1
    return words.view(np.int32)


def gptq(w: Codes, v2: bool = False) -> dict[str, Array]:
    """The tensors of a layer, by the last part of their names."""
    per = 32 // w.bits
    if w.bits == 3:
        qweight = _three_bits(w.codes.T)
    else:
        qweight = np.zeros((w.codes.shape[1] // per, len(w.codes)), np.uint32)
        for k in range(w.codes.shape[1]):
            qweight[k // per] |= (w.codes[:, k] << (w.bits * (k % per))).astype(np.uint32)
        qweight = qweight.view(np.int32)
    qzeros = stream(w.zeros.T, w.bits).copy()
    if not v2 and w.bits == 3:  # GPTQModel subtracts 1 from each
        qzeros = stream((w.zeros.T - 1) % 8, 3).copy()
    elif not v2:  # from whole words
        ones = stream(np.ones((1, len(w.codes)), int), w.bits)
        qzeros = (qzeros.view(np.uint32) - ones.view(np.uint32)).view(np.int32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": w.scales.T.copy(), "g_idx": w.index.astype(np.int32)}


def awq(w: Codes) -> dict[str, Array]:
    """The same for the GEMM layout of AutoAWQ."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(codes: Array) -> Array:
        words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
        for column in range(words.shape[1]):
            for i in range(8):
                words[:, column] |= (codes[:, column * 8 + order[i]] << (4 * i)).astype(np.uint32)
        return words.view(np.int32)

    return {"qweight": packed(w.codes.T), "qzeros": packed(w.zeros.T), "scales": w.scales.T.copy()}


def pack_quantized(w: Codes, symmetric: bool = False, whole_codes: bool = False) -> dict[str, Array]:
    """The same for compressed-tensors; `whole_codes` if no word ends within a code, as older versions wrote it."""
    pack = _whole_codes if whole_codes else stream
    tensors = {
        "weight_packed": pack(w.codes, w.bits),
        "weight_scale": w.scales,
        "weight_shape": np.array(w.codes.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(w.zeros.T, w.bits).T.copy()
    if not np.array_equal(w.index, np.sort(w.index)):
        tensors["weight_g_idx"] = w.index.astype(np.int32)
    return tensors


def _whole_codes(codes: Array, bits: int) -> Array:
    per = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per)), np.uint32)
    for i in range(codes.shape[1]):
        words[:, i // per] |= (codes[:, i] << (bits * (i % per))).astype(np.uint32)
    return words.view(np.int32)


def torchao(w: Codes) -> dict[str, Array]:
    """The same for torchao: signed codes and zero points in bytes."""
    middle = 1 << (w.bits - 1)
    return {
        "_weight_qdata": (w.codes - middle).astype(np.int8),
        "_weight_scale": w.scales,
        "_weight_zero_point": (w.zeros - middle).astype(np.int8),
    }


def torchao_told(w: Codes) -> str:
    """The metadata of a weight of torchao."""
    block = [1, w.codes.shape[1] // w.scales.shape[1]]
    bfloat16 = {"_type": "torch.dtype", "_data": "bfloat16"}
    if w.bits == 8:
        about = {"act_quant_kwargs": None, "reduce_range": False, "block_size": block, "dtype": bfloat16}
        return json.dumps(
            {"_type": "Int8Tensor", "_data": about, "_tensor_data_names": ["zero_point", "qdata", "scale"]}
        )
    target = {"_type": "torch.dtype", "_data": f"int{w.bits}"}
    about = {"target_dtype": target, "block_size": block, "dtype": bfloat16, "activation_quantization": None}
    return json.dumps(
        {"_type": "IntxUnpackedToInt8Tensor", "_data": about, "_tensor_data_names": ["qdata", "scale", "zero_point"]}
    )


def shapes() -> Iterator[tuple[str, tuple[int, int]]]:
    """The modules of the model that are quantized, and the shapes of their weights."""
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        yield f"{at}.self_attn.q_proj", (DIM, DIM)
        yield f"{at}.self_attn.k_proj", (DIM // 2, DIM)
        yield f"{at}.self_attn.v_proj", (DIM // 2, DIM)
        yield f"{at}.self_attn.o_proj", (DIM, DIM)
        yield f"{at}.mlp.gate_proj", (FFN, DIM)
        yield f"{at}.mlp.up_proj", (FFN, DIM)
        yield f"{at}.mlp.down_proj", (DIM, FFN)


def plain_tensors() -> dict[str, Array]:
    """The tensors that stay floats."""
    rng = np.random.default_rng(7)
    norms = [f"model.layers.{i}.{n}" for i in range(LAYERS) for n in ("input_layernorm", "post_attention_layernorm")]
    tensors = {f"{n}.weight": rng.uniform(0.5, 1.5, DIM) for n in (*norms, "model.norm")}
    tensors |= {n: rng.normal(0, 0.3, (VOCAB, DIM)) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def save(
    folder: Path,
    tensors: dict[str, Array],
    how: dict[str, Any] | None = None,
    told: dict[str, str] | None = None,
) -> Path:
    """Write a folder of `tensors` beside the plain ones, quantized as `how` says; its file says what is `told`."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if how is not None:
        config["quantization_config"] = how
    (folder / "config.json").write_text(json.dumps(config))
    save_file(plain_tensors() | tensors, folder / "model.safetensors", {"format": "pt"} | (told or {}))
    return folder


def model(
    folder: Path,
    how: dict[str, Any],
    pack: Callable[[Codes], dict[str, Array]],
    tell: Callable[[Codes], str] | None = None,
    **drawn: Any,
) -> tuple[Path, Path, dict[str, Codes]]:
    """A quantized folder, one of the numbers that its weights stand for, and these weights by module."""
    weights = {name: draw(*shape, seed=n, **drawn) for n, (name, shape) in enumerate(shapes())}
    packed = {f"{name}.{part}": t for name, w in weights.items() for part, t in pack(w).items()}
    plain = {f"{name}.weight": w.numbers.astype(np.float32) for name, w in weights.items()}
    told = {f"{name}.weight": tell(w) for name, w in weights.items()} if tell else {}
    return save(folder / "quantized", packed, how, told), save(folder / "plain", plain), weights
