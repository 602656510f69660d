"""Kernels at odd shapes: what test_kernels.py checks, and a kernel that keeps the one after it waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu import kernel_inputs as inputs
from gpu.kernel_inputs import Draw, Inputs
from gpu.kernel_timing import find_module
from torch import Tensor

from weft.backends.torch.kernels.shared.launch import jit, tl, triton


@dataclass(frozen=True)
class Odd:
    """A call of `kernel`. A result is rounded `roundings` times on its way, its sums have `terms` terms.

    `late` are the arguments that a kernel ahead may have written: activations, caches and states, not weights.
    """

    kernel: str
    draw: Callable[[Draw], Inputs]
    terms: int
    late: Sequence[int] = (0,)
    roundings: int = 1

    @property
    def file(self) -> Any:
        return find_module(self.kernel)

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The launcher and its reference."""
        launcher = getattr(self.file, self.kernel)
        return launcher, partial(launcher, kernel=False)


def _odd(draw: Callable[..., Inputs], **sizes: Any) -> Callable[[Draw], Inputs]:
    return partial(draw, **sizes)


CASES = {
    "norm_linear": Odd(
        "norm_linear", _odd(inputs.norm_linear, rows=3, out=37, inner=130, kind="layer", bias=True), 130
    ),
    "norm_linear one row": Odd("norm_linear", _odd(inputs.norm_linear, rows=1, out=131, inner=264), 264),
    "norm_glu": Odd("norm_glu", _odd(inputs.norm_glu, rows=2, hidden=45, inner=200), 200),
    "norm_qkv": Odd(
        "norm_qkv",
        _odd(inputs.norm_qkv, batch=2, heads=3, kv_heads=1, d=20, inner=136, capacity=9, rotary=12, interleaved=True),
        136,
        (0, 2, 3, 4),
    ),
    "norm_qkv head norms": Odd(
        "norm_qkv",
        _odd(
            inputs.norm_qkv,
            batch=1,
            heads=2,
            kv_heads=2,
            d=64,
            inner=264,
            capacity=6,
            head_norms=True,
            bias=True,
            rolling=True,
            keep_first=1,
        ),
        264,
        (0, 2, 3, 4),
    ),
    "linear_residual": Odd("linear_residual", _odd(inputs.linear_residual, rows=1, out=70, inner=1100), 1100, (0, 2)),
    "decode_attention": Odd(
        "decode_attention",
        _odd(inputs.decode_attention, batch=2, heads=6, kv_heads=2, d=40, length=150, capacity=200),
        150,
        (0, 1, 2, 3),
        roundings=2,
    ),
    "decode_attention window": Odd(
        "decode_attention",
        _odd(
            inputs.decode_attention,
            batch=1,
            heads=4,
            kv_heads=4,
            d=64,
            length=300,
            window=77,
            keep_first=3,
            softcap=9.0,
        ),
        77,
        (0, 1, 2, 3),
        roundings=2,
    ),
    "decode_attention merged after": Odd(
        "decode_attention",
        _odd(inputs.decode_attention, batch=1, heads=16, kv_heads=1, d=256, length=300, splits=10),
        300,
        (0, 1, 2, 3),
        roundings=2,
    ),
    "decode_attention of several tokens": Odd(
        "decode_attention",
        _odd(inputs.several_tokens, batch=2, seq=5, heads=6, kv_heads=2, d=40, length=150),
        150,
        (0, 1, 2, 3),
        roundings=2,
    ),
    "decode_attention of several tokens, fp8": Odd(
        "decode_attention",
        _odd(inputs.several_tokens, batch=1, seq=3, heads=4, kv_heads=1, d=64, length=300, floats=True),
        300,
        (0, 1, 2, 3),
        roundings=2,
    ),
    "window_attention": Odd(
        "window_attention",
        _odd(inputs.window_attention, batch=1, heads=4, kv_heads=2, d=24, seq=70, window=19, keep_first=3),
        22,
        (0, 1, 2),
        roundings=2,
    ),
    "norm_linear 4 bits": Odd(
        "norm_linear", _odd(inputs.coded_linear, rows=2, out=21, inner=192, bits=4, group=32, offsets=True), 192
    ),
    "norm_linear 8 bits": Odd("norm_linear", _odd(inputs.coded_linear, rows=1, out=35, inner=96, bits=8, group=96), 96),
    **{
        f"norm_linear {rows} rows": Odd("norm_linear", _odd(inputs.norm_linear, rows=rows, out=70, inner=264), 264)
        for rows in (4, 8, 16, 32, 64)
    },
    **{
        f"norm_linear 4 bits {rows} rows": Odd(
            "norm_linear", _odd(inputs.coded_linear, rows=rows, out=70, inner=384), 384
        )
        for rows in (4, 8, 16, 32, 64)
    },
    "norm_qkv fp8 caches": Odd(
        "norm_qkv",
        _odd(inputs.norm_qkv, batch=2, heads=3, kv_heads=1, d=20, inner=136, capacity=9, rotary=12, floats=True),
        136,
        (0, 2, 3, 4),
    ),
    "decode_attention fp8 caches": Odd(
        "decode_attention",
        _odd(inputs.decode_attention, batch=2, heads=5, kv_heads=1, d=40, length=130, splits=3, floats=True),
        130,
        (0, 1, 2, 3),
        roundings=2,
    ),
    **{
        f"norm_linear fp8 {rows} rows": Odd(
            "norm_linear", _odd(inputs.coded_linear, rows=rows, out=70, inner=384, form="fp8"), 384
        )
        for rows in (1, 8, 16, 32, 64)
    },
    **{
        f"norm_linear {form} {rows} rows": Odd(
            "norm_linear", _odd(inputs.coded_linear, rows=rows, out=70, inner=inner, form=form), inner
        )
        for form, inner in (("mxfp4", 352), ("nvfp4", 336))
        for rows in (1, 8, 16, 64)
    },
    **{
        f"dequantize_weights {form}": Odd(
            "dequantize_weights", _odd(inputs.dequantize_weights, out=67, inner=inner, form=form), 1, ()
        )
        for form, inner in (("mxfp4", 352), ("nvfp4", 336))
    },
    "dequantize_weights": Odd(
        "dequantize_weights", _odd(inputs.dequantize_weights, out=35, inner=96, group=32, offsets=True), 1, ()
    ),
    "dequantize_weights fp8": Odd(
        "dequantize_weights", _odd(inputs.dequantize_weights, out=67, inner=384, form="fp8"), 1, ()
    ),
    "quantize_float8": Odd("quantize_float8", _odd(inputs.quantize_float8, rows=11, inner=384, group=128), 1),
    "quantize_float8 rows": Odd("quantize_float8", _odd(inputs.quantize_float8, rows=3, inner=100, group=100), 1),
    "norm_rope_cache": Odd(
        "norm_rope_cache", _odd(inputs.norm_rope_cache, batch=2, seq=37, heads=3, kv_heads=1, d=20), 1, (0, 1, 2)
    ),
    "norm_rope_cache normed": Odd(
        "norm_rope_cache",
        _odd(inputs.norm_rope_cache, batch=1, seq=70, heads=4, kv_heads=2, d=24, head_norms=True),
        24,
        (0, 1, 2),
    ),
    "norm_rope_cache fp8": Odd(
        "norm_rope_cache",
        _odd(inputs.norm_rope_cache, batch=1, seq=9, heads=2, kv_heads=2, d=16, floats=True),
        1,
        (0, 1, 2),
    ),
    "gated_activation": Odd("gated_activation", _odd(inputs.gated_activation, rows=70, hidden=1100), 1),
    "latent_decode": Odd(
        "latent_decode",
        _odd(inputs.latent_decode, batch=2, heads=5, rank=48, rope=16, length=130),
        130,
        (0, 1, 2),
        roundings=2,
    ),
    "latent_decode merged after": Odd(
        "latent_decode",
        _odd(inputs.latent_decode, batch=1, heads=16, rank=512, rope=64, length=300, splits=6),
        576,
        (0, 1, 2),
        roundings=2,
    ),
    "latent_qk": Odd(
        "latent_qk",
        _odd(inputs.latent_qk, batch=2, heads=3, rank=200, plain=24, rope=12, capacity=9),
        200,
        (0, 1, 3, 4, 5, 6),
    ),
    "linear_by_head": Odd("linear_by_head", _odd(inputs.linear_by_head, rows=3, heads=2, out=37, inner=130), 130),
    "moe_decode": Odd(
        "moe_decode",
        _odd(inputs.moe_decode, tokens=2, experts=5, k=2, hidden=24, dim=40),
        40,
        roundings=2,
        late=(0, 1, 2),
    ),
    "moe_decode ungated": Odd(
        "moe_decode",
        _odd(inputs.moe_decode, tokens=1, experts=3, k=3, hidden=24, dim=72, gated=False),
        72,
        (0, 1, 2),
        2,
    ),
    "moe_decode in groups": Odd(
        "moe_decode",
        _odd(inputs.moe_decode, tokens=21, experts=5, k=2, hidden=72, dim=136),
        136,
        roundings=2,
        late=(0, 1, 2),
    ),
    "embed_tokens": Odd(
        "embed_tokens", _odd(inputs.embed_tokens, batch=3, vocab=50, dim=600, pairs=20), 1, (0, 2), roundings=0
    ),
    "choose_tokens": Odd("choose_tokens", _odd(inputs.choose_tokens, batch=3, vocab=5003), 1, roundings=0),
    "choose_tokens from all": Odd(
        "choose_tokens", _odd(inputs.choose_tokens, batch=3, vocab=5003, temperature=0.8), 1, roundings=0
    ),
    "choose_tokens filtered": Odd(
        "choose_tokens",
        _odd(inputs.choose_tokens, batch=2, vocab=40_001, temperature=1.5, top_k=60, top_p=0.9, min_p=0.01),
        1,
        roundings=0,
    ),
    "norm_route": Odd("norm_route", _odd(inputs.norm_route, tokens=3, experts=21, k=4, dim=136), 136),
    "route": Odd("route", _odd(inputs.route, tokens=3, experts=21, k=4, scoring="sigmoid", biased=True), 21),
    "conv_step": Odd("conv_step", _odd(inputs.conv_step, batch=2, channels=150), 4, (0, 3)),
    "mamba_scan": Odd("mamba_scan", _odd(inputs.mamba_scan, batch=2, seq=70, channels=40, states=5), 350, (0, 1, 3, 4)),
    "selective_step": Odd(
        "selective_step",
        _odd(inputs.selective_step, batch=2, channels=100, states=16, rank=13, normed=True),
        29,
        (0, 1, 3, 4, 6),
    ),
    "mamba2_scan": Odd(
        "mamba2_scan",
        _odd(inputs.mamba2_scan, batch=1, seq=70, heads=3, width=24, states=20, past=True),
        1400,
        (0, 1, 3, 4, 6),
        3,
    ),
    "ssd_step": Odd(
        "ssd_step",
        _odd(inputs.ssd_step, batch=2, heads=4, width=24, states=20, groups=2, norm_groups=2),
        68,
        (0, 1, 3, 4, 6),
    ),
    "matrix_step": Odd(
        "matrix_step",
        _odd(inputs.matrix_step, batch=2, heads=4, keys=20, width=41, groups=2),
        20,
        (0, 1, 2, 3),
    ),
    "matrix_step delta rule": Odd(
        "matrix_step",
        _odd(inputs.matrix_step, batch=2, heads=3, keys=96, width=40, groups=1, form="delta key"),
        192,
        (0, 1, 2, 3),
    ),
}


@jit
def _slow_copy(source, target, count, turns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # a Triton kernel
    """Lets the next kernel start at once, idles for `turns`, then copies."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < count)
    idle = tl.program_id(0).to(tl.float32)
    for _ in range(turns):
        idle = idle * 0.999 + 1.0
    tl.store(target + at, value, mask=(at < count) & (idle >= 0.0))  # always so, which the compiler cannot know


def variants() -> list[dict[str, Any]]:
    """The kernel as it is launched, for a compiler without a GPU, as fields of a Variant."""
    kinds = ("*bf16", "*fp32", "*i64")
    shared = {"count": "i32", "turns": "i32"}
    return [
        {
            "kernel": _slow_copy,
            "types": {"source": k, "target": k, **shared},
            "constants": {"BLOCK": 1024},
            "vectors": False,
        }
        for k in kinds
    ]


def produce(source: Tensor, target: Tensor, turns: int) -> None:
    """Copy `source` to `target`, contiguous both, by a kernel that the next one may overtake."""
    assert source.is_contiguous() and target.is_contiguous()
    grid = (triton.cdiv(source.numel(), 1024),)
    _slow_copy[grid](source, target, source.numel(), turns, BLOCK=1024, launch_pdl=True)
