"""Compare sentence embeddings of all-MiniLM-L6-v2 by weft's `encode` and sentence-transformers in texts per second.

sentence-transformers runs in PyTorch and on ONNX Runtime. Its ONNX backend needs optimum, which requires an older
transformers; its Transformer here passes the same tokens to a session of the model that transformers' `OnnxExporter`
writes, and still tokenizes, sorts, batches, pools and normalizes itself. All take turns on the same texts with the same
number of threads; their embeddings are compared first.

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

from weft.backends.runtime.ort.session import import_onnxruntime

MODEL = Path(__file__).parent.parent / ".cache" / "weights" / "all-MiniLM-L6-v2"
TEXT = Path(__file__).parent / "texts" / "held_out.txt"


class OrtEncoder(torch.nn.Module):
    """The encoder of `model` in a session of ONNX Runtime with `threads`, in place of its PyTorch module."""

    def __init__(self, model: Any, folder: Path, threads: int) -> None:
        super().__init__()
        self.config = model.config
        ids = torch.ones(2, 8, dtype=torch.long)  # inputs must be distinct tensors: the exporter merges equal ones
        inputs = {"input_ids": ids, "attention_mask": ids.clone(), "token_type_ids": ids - 1}
        OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True)).save_pretrained(folder)
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.names = [i.name for i in self.session.get_inputs()]

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        (states,) = self.session.run(["last_hidden_state"], {name: inputs[name].numpy() for name in self.names})
        return {"last_hidden_state": torch.from_numpy(states)}


def read_sentences(count: int) -> list[str]:
    """Return `count` sentences of one to a few dozen words; every fourth is joined with the two after it."""
    parts = [part.strip() for part in re.split(r"(?<=[.!?])\s+", TEXT.read_text("utf-8")) if len(part) > 8]
    joined = [" ".join(parts[i : i + 3]) if i % 4 == 0 else parts[i] for i in range(len(parts))]
    return (joined * (count // len(joined) + 1))[:count]


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
    texts, batch = read_sentences(args.texts), args.batch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weft.compile(MODEL, folder / "weft", target="ort-cpu")
        ours = weft.load(folder / "weft", threads=args.threads)
        plain = SentenceTransformer(str(MODEL), device="cpu")
        theirs = SentenceTransformer(str(MODEL), device="cpu")
        theirs[0].model = OrtEncoder(theirs[0].model, folder / "exported", args.threads)
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
