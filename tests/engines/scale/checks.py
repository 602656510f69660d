"""Check what processes of a group made of folders: against the reference, and against what inspect counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version

from weft.backends.torch.transformers.scale.estimate import ParallelCosts, estimate_costs
from weft.backends.torch.transformers.scale.shards import Split
from weft.backends.torch.transformers.transformers_folder import TransformersFolder
from weft.ir import Graph

from ...backends.torch.transformers.folders import error, wanted
from .jobs import logits, trained
from .models import LAYERS, folder_named, graph_named, tokens
from .processes import in_processes
from .stages import trained as staged

BOUND = 1e-4
STEPS = 3
EVEN = Version(transformers.__version__) >= Version("5.24")  # before, the last stage has all layers that are left over


def run_and_check(split: Split, names: list[str], parent: Path, **more: Any) -> None:
    """Divide the folders of models by transformers, and check logits, greedy tokens, bytes held and bytes sent."""
    ids, built = tokens(), [folder_named(name, parent) for name in names]
    groups = max(1, split.ep // split.tp)  # with texts of their own, over which transformers shards weights (FSDP2)
    sizes = {"tp_size": split.tp, "pp_size": split.pp, "ep_size": split.ep, "fsdp_size": groups}
    divided = {name: n for name, n in sizes.items() if n > 1} | more
    made = in_processes(split.devices, logits, [folder for folder, _ in built], ids, divided)
    for i, name in enumerate(names):
        results = [process[i] for process in made]
        agree(name, ids, results)
        costs = counted(built[i][1], split)
        if groups == 1 and (LAYERS % split.pp == 0 or EVEN):
            assert [r["weights"] for r in results] == held(costs)
        assert sent(results, groups) == expected(costs, ids.size, groups)


def agree(name: str, ids: Any, results: list[dict[str, Any]]) -> None:
    """Check that all processes made what the reference makes: logits, and greedy tokens with a cache."""
    want = reference(name, ids)
    assert max(error(torch.from_numpy(r["logits"]), want) for r in results) <= BOUND
    followed = results[0]["tokens"]
    assert all(np.array_equal(r["tokens"], followed) for r in results)
    start = ids.shape[1]
    best = reference(name, followed)[:, start - 1 : -1].argmax(-1)
    assert np.array_equal(followed[:, start:], best)


def reference(name: str, ids: Any) -> Any:
    """The logits of the float64 interpreter for one of the models."""
    return reference_of(graph_named(name), ids)


def reference_of(graph: Graph, ids: Any) -> Any:
    """The logits of the float64 interpreter."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    noise = {k: np.zeros([*ids.shape, v.shape[-1]]) for k, v in graph.inputs.items() if k.startswith("router_noise")}
    given = {"input_ids": ids, "position_ids": positions, **noise}
    return wanted(graph, {k: v for k, v in given.items() if k in graph.inputs})["logits"]


def counted(built: TransformersFolder, split: Split) -> ParallelCosts:
    """The costs by inspect, in f32."""
    return estimate_costs(built.base, built.plans, built.tensors, split, "f32", 4, 9)


def held(costs: ParallelCosts) -> list[int]:
    """Bytes of weights of each process: those of a stage follow each other."""
    return [stage.weights for stage in costs.stages for _ in range(costs.split.devices // costs.split.pp)]


def sent(results: list[dict[str, Any]], groups: int) -> dict[str, int]:
    """Bytes that all processes hand to each kind of collective; without the weights that FSDP2 gathers."""
    found: dict[str, int] = {}
    for kind, size in ((kind, size) for result in results for kind, size in result["bytes"].items()):
        if groups == 1 or kind != "all-gather":
            found[kind] = found.get(kind, 0) + size
    return found


def expected(costs: ParallelCosts, tokens: int, groups: int) -> dict[str, int]:
    """The same by inspect: what it counts for a token, of all tokens and devices of a stage."""
    found: dict[str, int] = {}
    split = costs.split
    for c in costs.collectives:
        devices = {"send": 1, "broadcast": split.pp}.get(c.kind, split.devices // split.pp)
        if groups == 1 or c.kind != "all-gather":
            found[c.kind] = found.get(c.kind, 0) + c.size * devices * tokens
    return found


def train_and_check(count: int, divided: dict[str, int], names: list[str], parent: Path) -> None:
    """Train folders of models in `count` processes, and check losses and weights against those of one process."""
    ids = tokens(4)
    for name in names:
        folder, built = folder_named(name, parent)
        (alone,) = in_processes(1, trained, folder, ids, {}, STEPS)
        assert alone["losses"][-1] < alone["losses"][0] - 0.3
        made = in_processes(count, trained, folder, ids, divided, STEPS)
        losses = np.mean([process["losses"] for process in made], 0)
        assert np.abs(losses - alone["losses"]).max() <= BOUND
        for process in made:
            for key, want in alone["weights"].items():
                assert error(torch.from_numpy(process["weights"][key]), want) <= BOUND, key
            assert process["held"] < (1 + 1 / count) / 2 * built.weight_bytes


def pipeline_and_check(stages: int, microbatches: int, name: str, parent: Path) -> None:
    """Train a model in stages, and check losses, weights, and bytes: activations forward, gradients back."""
    (folder, built), ids = folder_named(name, parent), tokens(4)
    (alone,) = in_processes(1, trained, folder, ids, {}, STEPS)
    made = in_processes(stages, staged, folder, ids, microbatches, STEPS)
    assert np.abs(np.array(made[-1]["losses"]) - alone["losses"]).max() <= BOUND
    assert set().union(*(process["weights"] for process in made)) == alone["weights"].keys()
    for process in made:
        for key, weight in process["weights"].items():
            assert error(torch.from_numpy(weight), alone["weights"][key]) <= BOUND, key
    sends = sum(c.size for c in counted(built, Split(pp=stages)).collectives if c.kind == "send")
    assert sum(process["bytes"] for process in made) == 2 * sends * ids.size
