"""Sentence embeddings of all-MiniLM-L6-v2: weft's `encode` beside sentence-transformers, texts a second.

sentence-transformers runs in PyTorch, and on ONNX Runtime: its backend for that needs optimum, which asks for an older
transformers, so its Transformer here hands the same tokens to a session over the model that transformers' own
`OnnxExporter` writes; tokenizing, sorting, batches, pooling and normalization stay its own. All take turns on the same
texts with as many threads, and embeddings are compared before.

    python benchmarks/bench_embeddings.py [--texts 512] [--rounds 7] [--threads 2] [--batch 32]
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import facts, save, spread
from sentence_transformers import SentenceTransformer
from transformers.exporters import OnnxConfig, OnnxExporter

from weft.backends.runtime.ort.session import onnxruntime

MODEL = Path(__file__).parent.parent / ".cache" / "weights" / "all-MiniLM-L6-v2"
TEXT = Path(__file__).parent / "texts" / "held_out.txt"


class Exported(torch.nn.Module):
    """The encoder of `model` in a session of ONNX Runtime with `threads`, in the place of its module of PyTorch."""

    def __init__(self, model: Any, folder: Path, threads: int) -> None:
        super().__init__()
        self.config = model.config
        ids = torch.ones(2, 8, dtype=torch.long)  # a tensor of its own for each input: one would stand for all
        given = {"input_ids": ids, "attention_mask": ids.clone(), "token_type_ids": ids - 1}
        OnnxExporter().export(model, given, OnnxConfig(dynamic=True)).save_pretrained(folder)
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.names = [i.name for i in self.session.get_inputs()]

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any, **kwargs: Any) -> dict[str, Any]:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        (states,) = self.session.run(["last_hidden_state"], {name: given[name].numpy() for name in self.names})
        return {"last_hidden_state": torch.from_numpy(states)}


def sentences(count: int) -> list[str]:
    """`count` sentences of one to a few dozen words; every fourth with the two after it."""
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+", TEXT.read_text("utf-8")) if len(part) > 8]
    some = [" ".join(parts[i : i + 3]) if i % 4 == 0 else parts[i] for i in range(len(parts))]
    return (some * (count // len(some) + 1))[:count]


def main() -> None:
    import weft

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # of tokenizers
    texts, batch = sentences(args.texts), args.batch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weft.compile(MODEL, folder / "weft", target="ort-cpu")
        ours = weft.load(folder / "weft", threads=args.threads)
        plain = SentenceTransformer(str(MODEL), device="cpu")
        theirs = SentenceTransformer(str(MODEL), device="cpu")
        theirs[0].model = Exported(theirs[0].model, folder / "exported", args.threads)
        runs: dict[str, Callable[[], Any]] = {
            "weft": lambda: ours.encode(texts, truncate=True, batch=batch),
            "sentence-transformers, ONNX Runtime": lambda: theirs.encode(texts, batch_size=batch),
            "sentence-transformers, PyTorch": lambda: plain.encode(texts, batch_size=batch),
        }
        vectors = {name: run() for name, run in runs.items()}
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(args.rounds):
            for name in [*runs] if number % 2 else [*runs][::-1]:
                start = time.perf_counter()
                runs[name]()
                rates[name].append(len(texts) / (time.perf_counter() - start))
    result: dict[str, Any] = {"machine": facts("weft", "onnxruntime", "torch", "sentence-transformers", "transformers")}
    result |= {"texts": len(texts), "threads": args.threads, "batch": batch}
    lengths = [len(ids) for ids in ours.tokenizer.encode_batch(texts)]
    result["tokens"] = {"mean": float(np.mean(lengths)), "max": max(lengths)}
    for name, values in rates.items():
        row: dict[str, Any] = {"texts_per_second": spread(values, 1)}
        if name != "weft":
            row["ratio"] = spread([a / b for a, b in zip(rates["weft"], values, strict=True)])
            row["difference"] = float(np.abs(vectors["weft"] - vectors[name]).max())
        result[name] = row
    save("embeddings", result)


if __name__ == "__main__":
    main()
