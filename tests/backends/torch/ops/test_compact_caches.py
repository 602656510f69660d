"""KV caches in FP8 and as integers: the values that they hold, and the models that use them."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, LayerNorm, Mask, RMSNorm, RoPE
from weft.backends.runtime.torch import module_caches as caches
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.ops.compact_caches import describe_limits
from weft.ir import Graph, WeftError, interpret
from weft.passes import run_passes

from ....e2e.random_models import strong
from ....lowered import build_module, build_step, write_step
from ....passes.zoo_variants import BIASED, VARIANTS, attends, decoder
from ....sampling import each
from ..generated import assert_close, call, tolerance
from ..kernels.shared.test_quantized_gemv import EIGHT, NUMBERS

LENGTH = 9
MODELS: dict[str, Decoder] = {
    "grouped": attends(),
    "norms of q and k": attends(qk_norm=RMSNorm()),
    "full norms of q and k": attends(qk_norm=RMSNorm(), qk_norm_full=True),
    "window": attends(window=3, keep_first=1, sinks=True, softcap=2.0),
    "biases, layer norm": decoder(attends(**BIASED).block.attn, norm=LayerNorm()),
}


def graph_of(name: str, layers: int = 2) -> Graph:
    return strong(replace(MODELS[name], layers=layers).graph())


def root_mean_squares(graph: Graph, name: str) -> np.ndarray:
    """The root mean square over a head of a linear map of normed numbers, by the names of the zoo's parameters."""
    params = {n: p.recipe.evaluate(graph.reader).astype(np.float64) for n, p in graph.params.items()}
    (weight,) = (w for n, w in params.items() if n.endswith(f"layers.0.attn.{name}.weight"))
    norm = next(w for n, w in params.items() if n.endswith("layers.0.attn_norm.weight"))
    bias = params.get(f"layers.0.attn.{name}.bias", np.zeros(len(weight)))
    return ((weight**2 @ norm**2) + bias**2).reshape(-1, 4).mean(1) ** 0.5


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest of all floats of 8 bits."""
    return EIGHT[NUMBERS[np.abs(EIGHT[NUMBERS] - x[..., None]).argmin(-1)]]


@pytest.mark.parametrize("name", MODELS)
def test_float8_caches_round_keys_and_values_to_the_nearest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the model whose caches keep what a search among all floats finds, however a text is cut."""
    graph = graph_of(name)
    plain: Any = build_module(graph).eval()
    module: Any = build_module(graph, float8_caches=True).eval()
    ids = torch.randint(1, 9, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    scales = [s for n, s in module.state_dict().items() if n.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 4 and all(s.dtype == torch.float32 and (s > 0).all() for s in scales)
    narrow = build_module(graph, float8_caches=True).bfloat16()
    assert all(b.dtype == torch.float32 for n, b in narrow.named_buffers() if n.endswith("_scale"))

    def rounding(kind: Any) -> Any:
        update, known = kind.update, dict[int, list[torch.Tensor]]()

        def changed(cache: Any, k: torch.Tensor, v: torch.Tensor, *more: Any) -> Any:
            own = (
                known.setdefault(id(cache), [scales.pop(0), scales.pop(0)])
                if id(cache) not in known
                else known[id(cache)]
            )
            kept = [nearest((x / s[:, None, None]).double().numpy()) for x, s in zip((k, v), own, strict=True)]
            return update(
                cache, *(torch.from_numpy(x).float() * s[:, None, None] for x, s in zip(kept, own, strict=True)), *more
            )

        return changed

    home = sys.modules[type(plain).__module__]
    for kind in ("KVCache", "RollingKVCache"):
        if hasattr(home, kind):
            monkeypatch.setattr(getattr(home, kind), "update", rounding(getattr(home, kind)))
    with torch.inference_mode():
        (want,) = call(plain, {"input_ids": ids, "cache": plain.new_cache(2, LENGTH)})
        for cuts in ((LENGTH,), (4, 1, 3, 1)):
            cache, found, start = module.new_cache(2, LENGTH), [], 0
            assert all(layer.k.dtype == layer.v.dtype == torch.uint8 for layer in cache)
            for n in cuts:
                found += call(module, {"input_ids": ids[:, start : start + n], "cache": cache})
                start += n
            assert_close(torch.cat(found, 1), want.double().numpy(), tolerance(graph, torch.float32))
        (exact,) = call(module, {"input_ids": ids})
        assert 1e-3 < float((want - exact).norm() / exact.norm()) < 0.1


def test_float8_scales_are_the_root_mean_squares_of_heads() -> None:
    module: Any = build_module(graph := graph_of("biases, layer norm"), float8_caches=True).eval()
    for role in "kv":
        np.testing.assert_allclose(
            getattr(module.layers[0].attn, f"{role}_scale").numpy(), root_mean_squares(graph, role), rtol=1e-5
        )
    normed: Any = build_module(graph := graph_of("norms of q and k"), float8_caches=True).eval()
    gain = next(
        p.recipe.evaluate(graph.reader) for n, p in graph.params.items() if n.endswith("layers.0.attn.k_norm.weight")
    )
    want = np.sqrt((gain.astype(np.float64) ** 2).mean())
    np.testing.assert_allclose(normed.layers[0].attn.k_scale.numpy(), want, rtol=1e-5)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", each(2, MODELS))
def test_decode_kernels_with_float8_caches_agree_with_the_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    graph = graph_of(name, layers=1)
    text, files = write_step(graph, float8_caches=True)
    assert "k_scale=self" in text and "decode_attention" in files
    for file in files:
        home = importlib.import_module(f"weft.backends.torch.kernels.{file}")
        if hasattr(home, file):
            monkeypatch.setattr(home, file, partial(getattr(home, file), kernel=True))
    module: Any = build_module(graph, float8_caches=True).eval()
    ids = torch.randint(1, 9, (2, LENGTH), generator=torch.Generator().manual_seed(6))
    step = build_step(graph, module, float8_caches=True)
    with torch.inference_mode():
        (whole, *_) = call(module, {"input_ids": ids, "cache": module.new_cache(2, LENGTH)})
        cache = module.new_cache(2, LENGTH)
        call(module, {"input_ids": ids[:, :4], "cache": cache})
        for i in range(4, 7):
            got = step(ids[:, i : i + 1], torch.full((2, 1), i), cache)
            assert_close(got, whole[:, i : i + 1].double().numpy(), tolerance(graph, torch.float32))


def test_folders_record_float8_caches_of_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    source, length = attends(), {"target": "torch", "max_length": 16}
    found = {}
    for name, more in (("plain", {}), ("fp8", {"cache_dtype": "fp8"})):
        report = weft.compile(source, tmp_path / name, **length, **more)
        model = weft.load(tmp_path / name, trust=True)
        (result,) = model.generate([3, 1, 4], max_tokens=4, temperature=0)
        found[name] = (
            report.notes,
            result.timings.cache_bytes,
            json.loads((tmp_path / name / "weft.json").read_text()),
        )
    assert found["fp8"][0] == found["plain"][0]
    assert 4 * found["fp8"][1] == found["plain"][1]
    assert found["fp8"][2]["cache_dtype"] == "fp8" and "cache_dtype" not in found["plain"][2]


def test_limits_of_float8_caches_are_described(tmp_path: Path) -> None:
    latent = decoder(MLA(3, 9, 5, 4, 7, RoPE(interleaved=True))).graph()
    unnormed = replace(attends(), block=replace(attends().block, arrangement="post")).graph()
    for graph, words in (
        (latent, "does not store its latents in FP8"),
        (unnormed, "a scale of 1: k is a linear map without"),
    ):
        assert any(words in note for note in describe_limits(graph)), describe_limits(graph)
        build_module(graph, float8_caches=True)
    with pytest.raises(WeftError, match="--cache-dtype 'int3' is unknown: choose int8 or int4 or fp8"):
        weft.compile(attends(), tmp_path / "out", target="torch", cache_dtype="int3")


def test_latent_attention_that_chooses_keys_has_no_float8_caches() -> None:
    module = build_module(VARIANTS["latent, keys chosen"].graph(), float8_caches=True)
    assert not [key for key in module.state_dict() if "scale" in key]


TOKENS = 13
CUTS = ((13,), (1,) * 13, (5, 1, 4, 3))


def model(attention: Any) -> Decoder:
    return Decoder(vocab=23, dim=16, layers=2, block=Block(attention, GatedMLP(24), norm=RMSNorm()), context=64)


CODED = {
    "grouped": model(Attention(heads=4, kv_heads=2, rope=RoPE())),
    "window": model(Attention(heads=4, kv_heads=2, rope=RoPE(), window=4)),
    "first keys, sinks, cap": model(
        Attention(heads=4, kv_heads=1, window=4, sinks=True, softcap=2.0, mask=Mask(keep_first=1))
    ),
    "latent": model(MLA(heads=2, rank=8, head_dim=8, rope_dim=4, v_head_dim=8, rope=RoPE())),
}


def coded(name: str, bits: int, per: str = "channel") -> Graph:
    return run_passes(strong(CODED[name].graph()), f"quantize-cache{{bits={bits}, per={per}}}")


@pytest.mark.parametrize(
    ("name", "bits", "per"), each(5, itertools.product(CODED, (8, 4), ("channel", "head", "tensor")))
)
def test_quantized_caches_agree_with_the_interpreter_in_any_pieces(name: str, bits: int, per: str) -> None:
    """In float64, where no number is rounded to another code."""
    graph = coded(name, bits, per)
    ids = np.random.default_rng(4).integers(0, 23, (2, TOKENS))
    at = np.tile(np.arange(TOKENS), (2, 1))
    inputs = {n: {"input_ids": ids, "position_ids": at}[n] for n in graph.inputs}
    wanted = interpret(graph, inputs)["logits"]
    module: Any = build_module(graph, dtype=torch.float64).eval()
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        np.testing.assert_allclose(module(tokens).numpy(), wanted, atol=1e-6 * np.abs(wanted).max())
        for cuts in CUTS:
            cache = module.new_cache(2, TOKENS)
            parts = [module(part, cache=cache) for part in tokens.split(cuts, 1)]
            found = torch.cat(parts, 1).numpy()
            np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_4_bit_caches_change_the_logits() -> None:
    """The check above can fail: 4 bits are not the numbers themselves."""
    plain: Any = build_module(strong(CODED["grouped"].graph()), dtype=torch.float64).eval()
    module: Any = build_module(coded("grouped", 4), dtype=torch.float64).eval()
    ids = torch.arange(TOKENS)[None]
    apart = (plain(ids) - module(ids)).abs().max() / plain(ids).abs().max()
    assert apart > 1e-3


@pytest.mark.parametrize(("bits", "bytes"), [(8, 1), (4, 0.5)])
def test_quantized_caches_take_8_or_4_bits_per_value(bits: int, bytes: float) -> None:
    module: Any = build_module(coded("grouped", bits)).eval()
    assert caches.count_bytes(module.new_cache(3, 20)) == 2 * 2 * 3 * 20 * 2 * 4 * bytes


def test_cache_scales_stay_f32_when_the_model_is_cast() -> None:
    module: Any = build_module(coded("grouped", 8)).eval().to(torch.bfloat16)
    scales = {n: b.dtype for n, b in module.named_buffers() if n.endswith("_scale")}
    assert len(scales) == 4
    assert {*scales.values()} == {torch.float32}
    assert not [n for n, _ in module.named_parameters() if n.endswith("_scale")]


@pytest.mark.parametrize("bits", [8, 4])
def test_folders_with_quantized_caches_generate_as_onnxruntime_does(bits: int, tmp_path: Path) -> None:
    source = strong(CODED["grouped"].graph())
    pipeline = f"default, quantize-cache{{bits={bits}}}"
    for target in ("torch", "ort-cpu"):
        weft.compile(source, tmp_path / target, target=target, passes=pipeline, max_length=32)
    runners: list[Any] = [weft.load(tmp_path / target, "cpu", trust=True) for target in ("torch", "ort-cpu")]
    for prompts in ([[3, 1, 4, 1, 5]], [[2, 7, 1], [8, 2, 8, 1, 8, 2]]):
        found = [[r.tokens for r in runner.generate(prompts, max_tokens=12)] for runner in runners]
        assert found[0] == found[1]
    assert runners[1].decoder.cache_bytes(1, 32) == 2 * 2 * 32 * 2 * 4 * bits // 8
