"""Quantize GGUF files by llama.cpp's tools and run them by its library, as a contender.

Needs a build of llama.cpp (the folder with llama-quantize, llama-imatrix and libllama.so) and the package
llama-cpp-python, which loads the library from there.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
IMATRIX_CONTEXT = 512  # tokens, the default of llama-imatrix


def quantize(build: Path, source: Path, calibration: Path, work: Path) -> tuple[dict[str, Path], dict[str, float]]:
    """Write GGUF files in the formats of `KINDS`, below 8 bits also with an importance matrix of `calibration`; return
    their paths and the seconds of each. `source` is a GGUF of floats."""
    matrix = work / "imatrix.gguf"
    environment = os.environ | {"LD_LIBRARY_PATH": str(build)}

    def call(tool: str, *arguments: str) -> None:
        subprocess.run([str(build / tool), *arguments], check=True, capture_output=True, env=environment)

    call("llama-imatrix", "-m", str(source), "-f", str(calibration), "-o", str(matrix), "-c", str(IMATRIX_CONTEXT))
    files, seconds = {}, {}
    for kind in KINDS:
        for weighted in (False, True) if kind != "Q8_0" else (False,):
            name = f"llamacpp_{kind.lower()}{'_imatrix' if weighted else ''}"
            files[name] = work / f"{name}.gguf"
            start = time.perf_counter()
            weights = ["--imatrix", str(matrix)] if weighted else []
            call("llama-quantize", *weights, str(source), str(files[name]), kind)
            seconds[name] = time.perf_counter() - start
    return files, seconds


class LlamaCppRun:
    """Run a GGUF by llama.cpp: the prompt in one batch, then one token at a time; logits of the last token only."""

    def __init__(self, path: Path, threads: int, capacity: int) -> None:
        import llama_cpp

        self.model: Any = llama_cpp.Llama(
            str(path),
            n_ctx=capacity,
            n_batch=capacity,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def _greedy(self) -> int:
        logits = np.ctypeslib.as_array(self.model._ctx.get_logits(), shape=(self.model.n_vocab(),))
        return int(logits.argmax())

    def prefill(self, ids: np.ndarray) -> int:
        self.model.reset()
        self.model.eval(ids[0].tolist())
        return self._greedy()

    def step(self, token: int, done: int) -> int:
        self.model.eval([token])
        return self._greedy()
