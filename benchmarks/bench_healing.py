"""Reduce the key and value heads of a trained model and heal it by more training: loss on held-out text.

A model with equal numbers of key, value and query heads (examples/train_characters.py) is trained, converted, and
trained further; a second one has few heads from the start. Writes results/healing.json and a chart of the curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chart import save_chart
from machine import RESULTS, facts, save

import weft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_characters as base

KV_HEADS, EVERY = 2, 25
HEALING_RATE = base.PEAK_RATE / 2
Curve = list[tuple[float, float]]


def train_further(net: Any, codes: torch.Tensor, probe: torch.Tensor, steps: int, start: int, **options: Any) -> Curve:
    """Train `net` from step `start` on; return its loss on `probe` every EVERY steps."""
    data = base.batches(codes, seed=start)
    curve = [(float(start), base.evaluate(net, probe))]
    for step, _ in base.train(net, data, steps, **options):
        if step % EVERY == 0 or step == steps:
            curve.append((float(start + step), base.evaluate(net, probe)))
            net.train()
    print(f"{curve[0][1]:.3f} -> {curve[-1][1]:.3f}", file=sys.stderr, flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=base.STEPS)
    parser.add_argument("--healing", type=int, default=400)
    args = parser.parse_args()
    codes, held_out = base.read(base.TEXT)
    probe = held_out[: 64 * base.CONTEXT + 1]

    net = weft.torch(base.model)
    wall, cpu, load = time.perf_counter(), time.process_time(), os.getloadavg()[0]
    for _ in base.train(net, base.batches(codes), args.steps):
        pass
    seconds = {
        "wall": round(time.perf_counter() - wall, 1),
        "processor": round(time.process_time() - cpu, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    training = {"loss": round(base.evaluate(net, held_out), 4), "seconds": seconds}
    print(training, file=sys.stderr, flush=True)
    graph = weft.with_weights(base.model.graph(), net.state_dict())

    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.npy"
        np.save(ids, codes[: 64 * base.CONTEXT].view(64, -1).numpy())
        svd = f'mha-to-gqa{{kv_heads={KV_HEADS}, method=svd, calibration="{ids}"}}'
        fewer = {
            "mean": weft.run_passes(graph, f"mha-to-gqa{{kv_heads={KV_HEADS}}}"),
            "svd": weft.run_passes(graph, svd),
        }
        starts = {"MHA, trained on": weft.torch(graph)}
        starts |= {f"GQA by {method}": weft.torch(graph) for method, graph in fewer.items()}
    few = dataclasses.replace(base.block, attn=dataclasses.replace(base.block.attn, kv_heads=KV_HEADS))
    scratch = weft.torch(dataclasses.replace(base.model, block=few))

    curves, final = {}, {}
    for name, start in starts.items():
        before = base.evaluate(start, held_out)
        curves[name] = train_further(start, codes, probe, args.healing, args.steps, peak=HEALING_RATE)
        final[name] = {"before": round(before, 4), "after": round(base.evaluate(start, held_out), 4)}
    name = "GQA from scratch"
    curves[name] = train_further(scratch, codes, probe, args.steps + args.healing, 0)
    final[name] = {"after": round(base.evaluate(scratch, held_out), 4)}

    result = {
        "machine": facts("torch", "numpy"),
        "threads": torch.get_num_threads(),
        "text": base.TEXT.name,
        "parameters": {
            "MHA": sum(p.numel() for p in net.parameters()),
            "GQA": sum(p.numel() for p in scratch.parameters()),
        },
        "heads": base.block.attn.heads,
        "kv_heads": KV_HEADS,
        "steps": args.steps,
        "healing_steps": args.healing,
        "characters_a_step": base.BATCH * base.CONTEXT,
        "unit": "nats a character on the held-out tenth of the text",
        "training": training,
        "loss": final,
        "curves": {name: [(int(s), round(v, 4)) for s, v in curve] for name, curve in curves.items()},
    }
    save("healing", result)
    draw_curves(result)


def draw_curves(result: dict[str, Any]) -> None:
    """Draw the curves of a result from the conversion of the heads on."""
    start = result["steps"]
    curves = {name: [(s, v) for s, v in curve if s >= start] for name, curve in result["curves"].items()}
    title = f"{result['heads']} key and value heads become {result['kv_heads']}"
    save_chart(RESULTS / "healing.svg", title, "steps of training", "nats a character", curves, linear=True)


if __name__ == "__main__":
    main()
