"""Measure how much of a rewrite's loss `weft distil` returns: SmolLM2-135M, rewritten in seven ways.

For each rewrite: the plain one, the one fitted to a text (where the pass can), and the fitted one distilled for at most
--minutes. NLL and KL divergence on READMEs of packages that no training text contains, and on a text of another domain
(the manual of Python); bytes of the cache per token, tokens per second, and the share of greedy tokens that are the
original's, in transformers, llama.cpp and ONNX Runtime. The training text is made of the READMEs of the packages
installed next to this Python (minus those of the held-out text), and the mixture that comes with weft.

    python tests/weights.py SmolLM2-135M-Instruct.Q4_1.gguf .cache/weights
    python benchmarks/bench_distil.py [REWRITE ...] [--minutes 60]
    python benchmarks/bench_distil.py --text data/ --tokens 100000000 --device cuda        on a GPU
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from machine import RESULTS, facts, save
from smollm2 import GGUF

import weft
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.passes.fitting.calibration import MIXTURE

TEXTS = Path(__file__).parent / "texts"
HELD_OUT = {"transformers", "ml_dtypes", "tokenizers", "safetensors", "packaging"}  # packages in held_out.txt
FIT = f"method=svd, calibration={json.dumps(str(TEXTS / 'calibration.txt'))}"
REWRITES: dict[str, dict[str, str]] = {
    "1 KV head": {"plain": "mha-to-gqa{kv_heads=1}", "fitted": f"mha-to-gqa{{kv_heads=1, {FIT}}}"},
    "windows of 512 in 3 of 4 layers": {"plain": "local-global{window=512, every=4}"},
    "feed-forward −25 %": {"plain": "prune-neurons{keep=0.75}"},
    "6 layers less": {"plain": "prune-layers{remove=6}"},
    "MLA, half the cache": {"plain": "gqa-to-mla{rank=192}"},
    "int4, no grid": {"plain": "quantize{bits=4, method=rtn}", "fitted": "@best-int4"},
    "int3": {"plain": "quantize{bits=3, method=rtn}", "fitted": "@best-int3"},
}
