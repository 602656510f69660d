"""Caches of compiled ONNX decoders before the first call, for tests that run them in plain ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort


def empty_caches(session: ort.InferenceSession, batch: int, capacity: int) -> dict[str, np.ndarray]:
    """Zeros for every cache and state: without slots where a call appends to the past, else with `capacity` slots."""
    named = {"past_sequence_length": 0, "capacity": capacity}
    pasts = [i for i in session.get_inputs() if i.name.startswith("past")]
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
    return {i.name: np.zeros((batch, *(named.get(n, n) for n in i.shape[1:])), kinds[i.type]) for i in pasts}
