"""The cases that gpu_kernels.py measures: kernels at shapes of real models, batch 1 unless said.

Bytes are those that must move: weights, caches and states once, activations of one token not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gpu_inputs as inputs
from gpu_inputs import Draw, Inputs
from gpu_models import LLAMA_1B, LLAMA_8B, TINY, Shape

BF16 = 2  # bytes


@dataclass(frozen=True)
class Case:
    """`launcher` of the file `kernel` with inputs drawn by `draw`; `size` in bytes and `flops` are what it must do.

    `reference` is named in the same file; `rivals` are names of gpu_rivals.py; `sweep` are settings that may be other
    than they ship, by their names in `gpu_kernels.configured`.
    """

    kernel: str
    name: str
    draw: Callable[[Draw], Inputs]
    size: int
    flops: int = 0
    launcher: str = ""
    rivals: Sequence[str] = ()
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def make(self, device: str, seed: int) -> Inputs:
        return self.draw(Draw(device, seed))


def cases(large: bool) -> Iterator[Case]:
    """Every case; small ones, one per kernel, where only the code is checked."""
    for name, shape in {"8b": LLAMA_8B, "1b": LLAMA_1B}.items() if large else [("tiny", TINY)]:
        yield from _products(name, shape)
    yield from _attention(large)
    yield from _recurrences(large)


def _products(name: str, shape: Shape) -> Iterator[Case]:
    """The kernels of a Llama's layer, and its head."""
    dim, vocab = shape.dim, shape.vocab
    yield Case(
        "norm_linear",
        f"{name}_head",
        partial(inputs.norm_linear, rows=1, out=vocab, inner=dim),
        BF16 * vocab * dim,
        rivals=("compiled", "linear"),
    )


def _attention(large: bool) -> Iterator[Case]:
    for name, shape, length in (
        (
            ("8b_1k", LLAMA_8B, 1024),
            ("8b_4k", LLAMA_8B, 4096),
            ("8b_16k", LLAMA_8B, 16_384),
            ("8b_64k", LLAMA_8B, 65_536),
            ("1b_1k", LLAMA_1B, 1024),
            ("1b_32k", LLAMA_1B, 32_768),
        )
        if large
        else (("tiny", TINY, 64),)
    ):
        yield Case(
            "decode_attention",
            name,
            partial(
                inputs.decode_attention,
                batch=1,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                d=shape.head_dim,
                length=length,
            ),
            BF16 * 2 * length * shape.kv_heads * shape.head_dim,
            rivals=("sdpa", "sdpa_flash", "flex"),
            sweep={"splits": (2, 4, 8, 16, 24, 32, 48, 64, 96, 128), "decode_attention.STAGE": (18432, 36864, 73728)},
        )


def _recurrences(large: bool) -> Iterator[Case]:
    """Mamba-2.8B and Falcon-Mamba-7B, both with 16 states: tokens in bf16, states in f32."""
    for name, channels in (("mamba_2.8b", 5120), ("falcon_7b", 8192)) if large else (("tiny", 64),):
        states = 16
        yield Case(
            "selective_scan",
            f"{name}_step",
            partial(inputs.selective_step, batch=1, channels=channels, states=states),
            4 * 3 * channels * states,  # rates read, states read and written
            launcher="selective_step",
            rivals=("compiled",),
            sweep={"selective_scan.STEP_BLOCK": (32, 64, 128)},
        )
        seq = 2048 if large else 16
        yield Case(
            "selective_scan",
            f"{name}_{seq}",
            partial(inputs.selective_scan, batch=1, seq=seq, channels=channels, states=states),
            BF16 * 3 * seq * channels,
            rivals=("compiled",) if not large else (),  # token by token: a graph of 2048 steps is not compiled
            sweep={"chunk": (32, 64, 128, 256, 512)},
        )
