"""Measure SmolLM2-135M with a KV cache in FP8: bytes, and the change of its predictions for a text.

The text is read in chunks, so that later ones read keys and values from the cache. Scales of FACTORS times those that
weft computes from the weights show the cost of wrong scales. Costs are nats per token, and the KL divergence of the
next token's distribution from that of a cache in f32.

    python benchmarks/bench_caches.py [--tokens 1024]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import facts, save
from smollm2 import GGUF

TEXT = Path(__file__).parent / "texts" / "held_out.txt"
FACTORS = (1.0, 0.0625, 0.25, 4.0, 16.0)
CHUNK = 128  # tokens of a call


def predict(model: Any, ids: list[int]) -> np.ndarray:
    """Return log-probabilities of the next token after each token, [tokens, vocab]."""
    with torch.inference_mode():
        cache, sequence = model.new_cache(1, len(ids)), torch.tensor([ids])
        parts = [model(sequence[:, i : i + CHUNK], cache=cache) for i in range(0, len(ids), CHUNK)]
        logprobs: np.ndarray = torch.cat(parts, 1)[0].double().log_softmax(-1).numpy()
        return logprobs


def compare(logprobs: np.ndarray, exact: np.ndarray, ids: list[int]) -> dict[str, float]:
    targets = np.arange(len(ids) - 1), np.array(ids[1:])
    divergence = (np.exp(exact) * (exact - logprobs)).sum(-1)
    return {
        "nats_per_token": round(float(-logprobs[targets].mean()), 4),
        "cost": round(float((exact[targets] - logprobs[targets]).mean()), 4),
        "kl_mean": round(float(divergence.mean()), 4),
        "kl_99th_percentile": round(float(np.percentile(divergence, 99)), 3),
        "same_first_choice": round(float((logprobs.argmax(-1) == exact.argmax(-1)).mean()), 4),
    }


def main() -> None:
    import weft
    from weft.backends.runtime.torch import module_caches as caches

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": facts("weft", "torch"), "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as folder:
        loaded = {}
        for name, cache_dtype in (("f32", ""), ("fp8", "fp8")):
            out = Path(folder, name)
            weft.compile(GGUF, out, target="torch", max_length=args.tokens, cache_dtype=cache_dtype)
            loaded[name] = weft.load(out, device="cpu", trust=True)
        ids = loaded["f32"].tokenizer.encode(TEXT.read_text("utf-8"))[: args.tokens]
        models = {name: one.decoder.model for name, one in loaded.items()}
        exact = predict(models["f32"], ids)
        result["f32"] = {"cache_bytes": caches.count_bytes(models["f32"].new_cache(1, args.tokens))}
        result["f32"] |= compare(exact, exact, ids)
        result["fp8"] = {"cache_bytes": caches.count_bytes(models["fp8"].new_cache(1, args.tokens))}
        scales = {name: b for name, b in models["fp8"].named_buffers() if name.endswith("_scale")}
        computed = {name: b.clone() for name, b in scales.items()}
        for factor in FACTORS:
            for name, b in scales.items():
                b.copy_(computed[name] * factor)
            result["fp8"][f"scales_times_{factor:g}"] = compare(predict(models["fp8"], ids), exact, ids)
            print(factor, result["fp8"][f"scales_times_{factor:g}"], flush=True)
    save("caches", result)


if __name__ == "__main__":
    main()
