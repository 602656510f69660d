"""SmolLM2-135M with caches of 8 and 4 bits: bytes a token, and how far its predictions of a text move.

The text is predicted in windows of 256 tokens through the cache, by ONNX Runtime on a CPU; the loss is that of the
likelihood of each token, in nats, against the same model with caches in f32, and the KL divergence that of the next
token's distribution. With --speed the seconds of a decode step behind 64 tokens are added, models taking turns.

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
    from weft.frontends.app.api.verify.divergence import score_tokens, seconds_per_token

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    plain, found = "default,-last-token-logits", dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        weft.compile(GGUF, Path(folder, "f32"), passes=plain, max_length=2 * WINDOW)
        exact: Any = weft.load(Path(folder, "f32"), "cpu")
        ids = exact.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: args.tokens + 1]
        for bits, per in CODED:
            with tempfile.TemporaryDirectory() as scratch:
                passes = f"{plain},quantize-cache{{bits={bits},per={per}}}"
                weft.compile(GGUF, Path(scratch, "coded"), passes=passes, max_length=2 * WINDOW)
                coded: Any = weft.load(Path(scratch, "coded"), "cpu")
                first, own = score_tokens([exact, coded], ids, WINDOW, False, lambda *_: None)
                found[f"int{bits} {per}"] = {
                    "loss": round(own.nll - first.nll, 5),
                    "kl": round(own.kl, 5),
                    "same_first_choice": round(own.agreement, 4),
                    "bytes_per_token": coded.decoder.cache_bytes(1, WINDOW) // WINDOW,
                }
                if args.speed:
                    seconds = seconds_per_token([exact, coded], ids[:WINDOW], lambda *_: None)
                    found[f"int{bits} {per}"]["milliseconds_f32_and_coded"] = [round(1e3 * s, 2) for s in seconds]
            print(f"int{bits} {per}", found[f"int{bits} {per}"], flush=True)
        result = {
            "machine": facts("weft", "onnxruntime"),
            "tokens": len(ids) - 1,
            "f32": {
                "nats_per_token": round(first.nll, 5),
                "bytes_per_token": exact.decoder.cache_bytes(1, WINDOW) // WINDOW,
            },
            **found,
        }
    save("kv_cache", result)


if __name__ == "__main__":
    main()
