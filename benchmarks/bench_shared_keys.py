"""Time decode on ONNX Runtime with layers that share the KV cache of the first, against a cache per layer, on a CPU.

Twelve layers of 8 heads of 64 on 4 heads of keys, 256 wide, caches for 8,192 tokens, one thread: with `share_kv` the
last eleven read the cache of the first. Models are compiled once; rounds interleave them, and ratios are computed
within a round.

    python benchmarks/bench_shared_keys.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from machine import facts, save, spread

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

LAYERS, CAPACITY, PROMPT, TOKENS = 12, 8192, 800, 200


def model(shared: bool) -> Decoder:
    """Return layers that share the cache of the first, or with one each."""
    caches: list[dict[str, Any]] = [{"keep_kv": "memory"}, *[{"share_kv": "memory"} if shared else {}] * (LAYERS - 1)]
    layers = [Block(Attention(8, 4, 64, rope=RoPE(10_000), **kv), GatedMLP(256), RMSNorm(1e-6)) for kv in caches]
    return Decoder(vocab=500, dim=256, layers=layers, context=CAPACITY)


def time_token(decoder: Any, prompt: list[int]) -> float:
    """Return milliseconds per token after a prompt."""
    elapsed = []
    for count in (1, 1 + TOKENS):
        start = time.perf_counter()
        decoder.generate([prompt], max_tokens=count)
        elapsed.append(time.perf_counter() - start)
    return 1000 * (elapsed[1] - elapsed[0]) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    prompt = [3 + i % 400 for i in range(PROMPT)]
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, Any] = {}
        for name in ("shared", "own"):
            weft.compile(model(name == "shared"), Path(folder) / name, max_length=CAPACITY)
            models[name] = weft.load(Path(folder) / name)
        times: dict[str, list[float]] = {name: [] for name in models}
        for r in range(args.rounds + 1):  # the first warms up
            for name in list(models)[:: 1 if r % 2 else -1]:
                elapsed = time_token(models[name], prompt)
                if r:
                    times[name].append(elapsed)
                    print(f"round {r}, {name}: {elapsed:.3f} ms", flush=True)
        mib = {name: models[name].decoder.cache_bytes(1, CAPACITY) / 2**20 for name in models}
    ratios = [a / b for a, b in zip(times["shared"], times["own"], strict=True)]
    save(
        "shared_keys",
        {
            "what": f"{LAYERS} layers, caches for {CAPACITY} tokens, a token after {PROMPT} others, fp32, one thread",
            "machine": facts("onnxruntime"),
            **{f"{name}_cache_mib": mib[name] for name in models},
            **{f"{name}_milliseconds": spread(times[name]) for name in models},
            "shared_over_own": spread(ratios),
        },
    )


if __name__ == "__main__":
    main()
