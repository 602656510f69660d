"""Cases of kernels to measure, at shapes of real models, batch 1 unless named otherwise.

Bytes count the data that must move: weights, caches and states once; activations of one token do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product as combinations
from typing import Any

from . import kernel_inputs as inputs
from .kernel_inputs import Draw, Inputs
from .models import LLAMA_1B, LLAMA_8B, TINY, Shape

BF16 = 2  # bytes
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "all": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(frozen=True)
class Fixed:
    """A function that always returns `value`, in place of one that chooses a configuration."""

    value: Any

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Case:
    """A call of `kernel` with inputs from `draw`; `size` are the bytes and `flops` the operations that it needs.

    `peers` name functions in kernel_timing.py. `sweep` lists alternative settings, named as in `configure` there.
    `small` draws inputs for the check where those of `draw` are too large for the reference, which is then not timed.
    """

    kernel: str
    name: str
    draw: Callable[[Draw], Inputs]
    size: int
    flops: int = 0
    peers: Sequence[str] = ()
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    small: Callable[[Draw], Inputs] | None = None

    def make(self, device: str, seed: int) -> Inputs:
        return self.draw(Draw(device, seed))

    def make_check(self, device: str) -> Inputs:
        """Draw the inputs that the result is checked with."""
        return (self.small or self.draw)(Draw(device, 99))


def cases(large: bool) -> Iterator[Case]:
    """Yield all cases, or small ones, one per kernel and variant, to check the code."""
    for name, shape in {"8b": LLAMA_8B, "1b": LLAMA_1B}.items() if large else [("tiny", TINY)]:
        yield from _products(name, shape)
    yield from _attention(large)
    yield from _several(large)
    yield from _window(large)
    yield from _latent(large)
    yield from _quantized(large)
    yield from _prompts(large)
    yield from _experts(large)
    yield from _recurrences(large)


def _tiles(file: str, shares: Sequence[int] = (1, 2, 4, 8)) -> dict[str, Sequence[Any]]:
    """Return alternative tiles for a product of one row: rows of W per block, 16-byte loads per row, warps."""
    from weft.backends.torch.kernels.shared.gemv import Tile

    tiles = [
        Fixed(Tile(1, rows, 32 * 8 * warps * loads, 8, warps))
        for rows, loads, warps in combinations(shares, (1, 2), (1, 2, 4, 8))
    ]
    return {f"{file}.choose_tile": tiles}


def _products(name: str, shape: Shape) -> Iterator[Case]:
    """Yield the kernels of a layer of Llama and its head."""
    dim, vocab = shape.dim, shape.vocab
    size = {part: BF16 * out * inner for part, (out, inner) in shape.products().items()}
    qkv = partial(inputs.norm_qkv, batch=1, inner=dim, capacity=1024, **_heads(shape))
    glu = partial(inputs.norm_glu, rows=1, hidden=shape.hidden, inner=dim)
    out, down = (partial(inputs.linear_residual, rows=1, out=dim, inner=inner) for inner in (dim, shape.hidden))
    head = partial(inputs.norm_linear, rows=1, out=vocab, inner=dim)
    peers = ("compiled", "linear")
    yield Case("norm_qkv", name, qkv, size["qkv"], peers=peers, sweep=_tiles("norm_qkv", (2, 4, 8)))
    yield Case("linear_residual", f"{name}_out", out, size["out"], peers=peers, sweep=_tiles("linear_residual"))
    yield Case("norm_glu", name, glu, size["gate_up"], peers=peers, sweep=_tiles("norm_glu", (2, 4, 8)))
    yield Case("linear_residual", f"{name}_down", down, size["down"], peers=peers, sweep=_tiles("linear_residual"))
    start = partial(inputs.embed_tokens, batch=1, vocab=vocab, dim=dim, pairs=shape.head_dim // 2)
    yield Case("embed_tokens", name, start, BF16 * dim, peers=("compiled",))
    yield Case("norm_linear", f"{name}_head", head, BF16 * vocab * dim, peers=peers, sweep=_tiles("norm_linear"))
    for sampling, options in SAMPLING.items():
        choose = partial(inputs.choose_tokens, batch=1, vocab=vocab, **options)
        yield Case("choose_tokens", f"{name}_{sampling}", choose, BF16 * vocab, peers=("compiled",))


def _heads(shape: Shape) -> dict[str, Any]:
    return {"heads": shape.heads, "kv_heads": shape.kv_heads, "d": shape.head_dim}


def _attention(large: bool) -> Iterator[Case]:
    sizes = [(f"8b_{k}k", LLAMA_8B, k * 1024) for k in (1, 4, 32, 64)]
    sizes += [(f"1b_{k}k", LLAMA_1B, k * 1024) for k in (1, 32)]
    for name, shape, length in sizes if large else [("tiny", TINY, 64)]:
        draw = partial(inputs.decode_attention, batch=1, length=length, **_heads(shape))
        size = BF16 * 2 * length * shape.kv_heads * shape.head_dim
        sweep = {"splits": (2, 4, 8, 16, 24, 32, 48, 64, 96, 128), "decode_attention.STAGE": (18432, 36864, 73728)}
        yield Case("decode_attention", name, draw, size, peers=("sdpa", "sdpa_flash", "flex"), sweep=sweep)
        yield Case("decode_attention", f"{name}_fp8", partial(draw, floats=True), size // 2, sweep=sweep)


def _several(large: bool) -> Iterator[Case]:
    """Yield five tokens of Llama-3.1-8B at once, as in speculative decoding."""
    shape = LLAMA_8B if large else TINY
    for length in (1024, 32_768) if large else (64,):
        draw = partial(inputs.several_tokens, batch=1, seq=5, length=length, **_heads(shape))
        size = 2 * BF16 * length * shape.kv_heads * shape.head_dim
        yield Case("decode_attention", f"8b_{length}_5_tokens", draw, size, peers=("compiled",))


def _window(large: bool) -> Iterator[Case]:
    """Yield prompts much longer than the window of Mistral-7B, gpt-oss-20b and Gemma-3-4B."""
    sizes = {"mistral": (32, 8, 128, 4096), "gpt_oss": (64, 8, 64, 128), "gemma3": (8, 4, 256, 1024)}
    for name, (heads, kv_heads, d, window) in sizes.items() if large else [("tiny", (2, 1, 16, 8))]:
        for seq in (8192, 32_768) if large else (24,):
            draw = partial(inputs.window_attention, batch=1, heads=heads, kv_heads=kv_heads, d=d, window=window)
            pairs = seq * window - window * (window - 1) // 2
            yield Case(
                "window_attention",
                f"{name}_{seq}",
                partial(draw, seq=seq),
                BF16 * 2 * seq * d * (heads + kv_heads),
                4 * pairs * heads * d,
                peers=("flex_window", "sdpa_causal", *(("sdpa_window",) if seq < 10_000 else ())),
                sweep=_window_tiles() if seq < 10_000 else {},
                small=partial(draw, seq=window // 2 + 1000) if large else None,
            )


def _window_tiles() -> dict[str, Sequence[Any]]:
    from weft.backends.torch.kernels.prefill.window_attention import AttentionTile

    tiles = combinations((64, 128), (32, 64, 128), (4, 8), (2, 3))
    return {"window_attention._tile": [Fixed(AttentionTile(*tile)) for tile in tiles]}


def _quantized(large: bool) -> Iterator[Case]:
    """Yield linear layers of Llama-3.1-8B with weights of 4 bits in groups of 128 and 32, of 8 bits, and in FP8."""
    shapes = LLAMA_8B.products() if large else {"out": (64, 128)}
    names, group = ("gate_up", "down", "qkv", "out"), 128 if large else 64
    formats = [*((name, 4, 128) for name in names), ("gate_up", 4, 32), ("gate_up", 8, 32)]
    for name, rows in combinations(names, (1, 8, 32)) if large else [("out", 1)]:
        out, inner = shapes[name]
        yield Case(
            "norm_linear",
            f"8b_{name}_fp8" + (f"_{rows}_rows" if rows > 1 else ""),
            partial(inputs.coded_linear, rows=rows, out=out, inner=inner, form="fp8", group=group),
            out * inner + 4 * out * inner // group,
            peers=("dense",),
            sweep={"norm_linear.choose_tile": _coded_tiles(rows, 8, group)} if large else {},
        )
    for (name, bits, group), rows in combinations(formats, (1, 8, 32)) if large else [(("out", 4, 32), 1)]:
        out, inner = shapes[name]
        yield Case(
            "norm_linear",
            f"8b_{name}_{bits}_bits_by_{group}" + (f"_{rows}_rows" if rows > 1 else ""),
            partial(inputs.coded_linear, rows=rows, out=out, inner=inner, bits=bits, group=group),
            out * inner * bits // 8 + BF16 * out * inner // group,
            peers=("dense", *(("int4",) if bits == 4 and large else ())),
            sweep={"norm_linear.choose_tile": _coded_tiles(rows, bits, group)} if large else {},
        )


def _prompts(large: bool) -> Iterator[Case]:
    """Yield kernels between the products of prompts of Llama-3.1-8B, and conversions of weights and activations."""
    out, inner = LLAMA_8B.products()["gate_up"] if large else (64, 128)
    shape = LLAMA_8B if large else TINY
    for rows in (2048, 8192) if large else (70,):
        draw = partial(inputs.norm_rope_cache, batch=1, seq=rows, **_heads(shape))
        size = 2 * BF16 * rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        yield Case("norm_rope_cache", f"8b_{rows}_rows", draw, size, peers=("compiled",))
        draw = partial(inputs.gated_activation, rows=rows, hidden=out // 2)
        yield Case("gated_activation", f"8b_{rows}_rows", draw, 3 * BF16 * rows * out // 2, peers=("compiled",))
    for name, bits, form in (("4_bits", 4, "int"), ("fp8", 8, "fp8")):
        draw = partial(inputs.dequantize_weights, out=out, inner=inner, group=128, form=form)
        yield Case(
            "dequantize_weights", f"8b_gate_up_{name}", draw, out * inner * (bits + 16) // 8, peers=("compiled",)
        )
    for rows in (2048, 8192) if large else (4,):
        draw = partial(inputs.quantize_float8, rows=rows, inner=inner, group=128)
        yield Case("quantize_float8", f"{rows}_rows", draw, 3 * rows * inner, peers=("compiled",))


def _coded_tiles(rows: int, bits: int, group: int) -> Sequence[Any]:
    from weft.backends.torch.kernels.shared.gemv import Tile

    return [
        Fixed(Tile(max(rows, 8), outputs, chunks * 512 // bits, 1, warps, stages, bits, group, True))
        for outputs, warps, chunks, stages in combinations((16, 32, 64, 128), (1, 2, 4), (1, 2), (2, 3, 4))
        if warps <= outputs // 16
    ]


def _latent(large: bool) -> Iterator[Case]:
    """Yield latent attention of DeepSeek-V3 (128 heads) and -V2-Lite (16): rank 512 and 64 rotary features."""
    sizes = [(heads, length) for heads in (16, 128) for length in (1024, 8192, 65_536)] if large else [(4, 64)]
    for heads, length in sizes:
        yield Case(
            "latent_decode",
            f"{heads}_heads_{length}",
            partial(inputs.latent_decode, batch=1, heads=heads, rank=512, rope=64, length=length),
            BF16 * length * 576,
            2 * heads * length * (576 + 512),
            peers=("latent_sdpa", "latent_products"),
            sweep={"splits": (8, 16, 32, 64, 96, 128), "latent_decode.HEADS": (16, 32, 64)},
        )

    for heads in (16, 128) if large else (2,):  # before and after the attention
        rank, plain, rope = (512, 128, 64) if large else (32, 8, 8)
        product = BF16 * heads * plain * rank
        draw = partial(inputs.latent_qk, batch=1, heads=heads, capacity=1024, rank=rank, plain=plain, rope=rope)
        yield Case("latent_qk", f"{heads}_heads", draw, product, peers=("compiled",))
        draw = partial(inputs.linear_by_head, rows=1, heads=heads, out=plain, inner=rank)
        yield Case("linear_by_head", f"{heads}_heads", draw, product, peers=("compiled",))


def _experts(large: bool) -> Iterator[Case]:
    """Yield the routing and the experts of Mixtral-8x7B, Qwen3-30B-A3B and gpt-oss-20b."""
    sizes = {"mixtral": (8, 2, 14_336, 4096), "qwen3_30b": (128, 8, 768, 2048), "gpt_oss_20b": (32, 4, 2880, 2880)}
    for name, (experts, k, hidden, dim) in sizes.items() if large else [("tiny", (4, 2, 64, 64))]:
        for tokens in (1, 8, 32) if large else (1, 4):
            routed = experts * (1 - (1 - k / experts) ** tokens)  # expected number of distinct experts
            yield Case(
                "moe_decode",
                name if tokens == 1 else f"{name}_{tokens}_tokens",
                partial(inputs.moe_decode, tokens=tokens, experts=experts, k=k, hidden=hidden, dim=dim),
                int(BF16 * routed * 3 * hidden * dim),
                peers=("experts_batched", "experts_grouped", "experts_eager", "experts_compiled"),
                sweep=_tiles("moe_decode") if tokens == 1 else {},
            )
        router = partial(inputs.norm_route, tokens=1, experts=experts, k=k, dim=dim)
        yield Case("norm_route", name, router, BF16 * experts * dim, peers=("compiled",))
        choice = partial(inputs.route, tokens=1, experts=experts, k=k)
        yield Case("route", name, choice, BF16 * experts, peers=("compiled",))


def _recurrences(large: bool) -> Iterator[Case]:
    """Yield recurrences, with tokens in bf16 and states in f32: Mamba, Mamba-2 and gated linear attention."""
    for name, channels in (("mamba_2.8b", 5120), ("falcon_7b", 8192)) if large else (("tiny", 64),):
        states = 16
        rank = channels // 32  # of the projection to step sizes
        yield Case(
            "selective_step",
            name,
            partial(inputs.selective_step, batch=1, channels=channels, states=states, rank=rank),
            channels * (4 * 3 * states + BF16 * rank),  # decay rates, states read and written, the projection
            peers=("compiled",),
            sweep={"selective_step.CHANNELS": (16, 32, 64), "selective_step.WARPS": (1, 2, 4)},
        )
        seq = 2048 if large else 16
        yield Case(
            "mamba_scan",
            f"{name}_{seq}",
            partial(inputs.mamba_scan, batch=1, seq=seq, channels=channels, states=states),
            BF16 * 3 * seq * channels,
            peers=("compiled",) if not large else (),  # the reference is a graph of 2048 steps, too long to compile
            sweep={"chunk": (32, 64, 128, 256, 512)},
        )

    mamba2 = [("mamba2_2.7b", 80, 64, 128), ("falcon_h1_34b", 32, 128, 256)] if large else [("tiny2", 2, 16, 16)]
    for name, heads, width, states in mamba2:
        yield Case(
            "ssd_step",
            name,
            partial(inputs.ssd_step, batch=1, heads=heads, width=width, states=states, norm_groups=1),
            4 * 2 * heads * width * states,
            peers=("compiled",),
            sweep={"ssd_step.WIDTH": (16, 32, 64), "ssd_step.WARPS": (2, 4, 8)},
        )
        seq = 4096 if large else 16
        yield Case(
            "mamba2_scan",
            f"{name}_{seq}",
            partial(inputs.mamba2_scan, batch=1, seq=seq, heads=heads, width=width, states=states, past=True),
            BF16 * 2 * seq * (heads * width + states),
            4 * seq * heads * width * states,
            peers=("ssd_chunked",),
            sweep={"warps": (2, 4, 8), "stages": (1, 2, 3)},
        )
    matrices = [
        ("qwen3_next", 32, 16, 128, 128, "delta"),
        ("kimi_linear", 32, 32, 128, 128, "delta key"),
        ("minimax", 64, 64, 128, 128, ""),
        ("xlstm_7b", 8, 8, 256, 513, ""),
    ]
    for name, heads, groups, keys, width, form in matrices if large else [("tiny_delta", 2, 1, 16, 16, "delta key")]:
        sizes: dict[str, Any] = {"heads": heads, "groups": groups, "keys": keys, "width": width, "form": form}
        yield Case(
            "matrix_step",
            name,
            partial(inputs.matrix_step, batch=1, **sizes),
            4 * 2 * heads * keys * width,
            peers=("compiled",),
            sweep={"matrix_step.WIDTH": (16, 32, 64), "matrix_step.WARPS": (2, 4, 8)},
        )
    channels = 5376 if large else 64
    conv = partial(inputs.conv_step, batch=1, channels=channels)
    yield Case("conv_step", f"{channels}", conv, 16 * channels, peers=("compiled",))
