"""Measure SmolLM2-135M with a KV cache of 8 and 4 bits: bytes per token, and the change of its predictions for a text.

ONNX Runtime predicts the text on a CPU in windows of 256 tokens through the cache. The loss is in nats per token above
that of the same model with a cache in f32, the KL divergence that of the next token's distribution. --speed adds the
time of a decode step after 64 tokens, with the models taking turns.

    python benchmarks/bench_kv_cache.py [--tokens 3072] [--speed]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from machine import facts, save
from smollm2 import GGUF

TEXT = Path(__file__).parent / "texts" / "held_out.txt"
WINDOW = 256
CODED = [(bits, per) for bits in (8, 4) for per in ("channel", "head", "tensor")]


def main() -> None:
    import weft
    from weft.frontends.app.api.verify.divergence import measure_seconds, score_tokens

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    plain, rows = "default,-last-token-logits", dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        weft.compile(GGUF, Path(folder, "f32"), passes=plain, max_length=2 * WINDOW)
        exact: Any = weft.load(Path(folder, "f32"), "cpu")
        ids = exact.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: args.tokens + 1]
        for bits, per in CODED:
            with tempfile.TemporaryDirectory() as scratch:
                passes = f"{plain},quantize-cache{{bits={bits},per={per}}}"
                weft.compile(GGUF, Path(scratch, "coded"), passes=passes, max_length=2 * WINDOW)
                coded: Any = weft.load(Path(scratch, "coded"), "cpu")
                reference, score = score_tokens([exact, coded], ids, WINDOW, False, lambda *_: None)
                rows[f"int{bits} {per}"] = {
                    "loss": round(score.nll - reference.nll, 5),
                    "kl": round(score.kl, 5),
                    "same_first_choice": round(score.agreement, 4),
                    "bytes_per_token": coded.decoder.cache_bytes(1, WINDOW) // WINDOW,
                }
                if args.speed:
                    seconds = measure_seconds([exact, coded], ids[:WINDOW], lambda *_: None)
                    rows[f"int{bits} {per}"]["milliseconds_f32_and_coded"] = [round(1e3 * s, 2) for s in seconds]
            print(f"int{bits} {per}", rows[f"int{bits} {per}"], flush=True)
        result = {
            "machine": facts("weft", "onnxruntime"),
            "tokens": len(ids) - 1,
            "f32": {
                "nats_per_token": round(reference.nll, 5),
                "bytes_per_token": exact.decoder.cache_bytes(1, WINDOW) // WINDOW,
            },
            **rows,
        }
    save("kv_cache", result)


if __name__ == "__main__":
    main()
