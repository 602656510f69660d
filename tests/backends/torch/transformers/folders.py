"""Folders for transformers in tests: written, imported as packages, and loaded as `from_pretrained` does."""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.backends.target import TARGETS
from weft.backends.torch.transformers.transformers_folder import TransformersFolder
from weft.ir import Graph, Node, interpret
from weft.passes import run_passes
from weft.passes.core.equivalence import EquivalenceCheck

from ....e2e.random_models import Drawn, strong
from ....lowered import forms
from ....passes.zoo import ZOO

SEQ, PADDING = 12, 3
COMPETES = {"expert_choice", "limit_capacity"}  # tokens of one call with each other: calls do not add up
_COUNT = itertools.count()


def graph_of(name: str) -> Graph:
    """A graph of the zoo, or ``random/SEED``, a decoder, or ``encoder/SEED``, or ``both/SEED``, an encoder-decoder."""
    kind, _, seed = name.partition("/")
    if kind in ("random", "encoder", "both"):
        drawn = Drawn(int(seed))
        made = {"random": drawn.decoder, "encoder": drawn.encoder, "both": drawn.encoder_decoder}[kind]()
        # Without norms numbers may grow from layer to layer, until f32 says little of them.
        graphs = (strong(made.graph(), std) for std in (0.3, 0.1))
        return next((graph for graph in graphs if largest(graph) < 100), strong(made.graph(), 0.03))
    return ZOO[name]()


def largest(graph: Graph) -> float:
    """The largest number that a run of `graph` makes; ∞ where that is none."""
    found = [0.0]

    def watch(_node: Node, outputs: Sequence[NDArray[Any]]) -> None:
        found.extend(float(np.abs(x).max()) for x in outputs if x.dtype.kind == "f" and np.isfinite(x).all() and x.size)

    with np.errstate(all="ignore"):
        interpret(graph, EquivalenceCheck(0).make_inputs(graph, seq=SEQ), watch=watch)
    return max(found)


def lowered(graph: Graph) -> Graph:
    """`graph` after the pipeline of the target."""
    return run_passes(graph, TARGETS.lookup("transformers").pipeline(graph, "f32"))


def folder_of(graph: Graph, folder: Path) -> TransformersFolder:
    """Write the folder of a graph after its passes, of classes called Tiny…"""
    built = TransformersFolder(forms(graph, "transformers"), "f32", int(graph.meta.get("context") or 64), "Tiny", [])
    folder.mkdir(parents=True, exist_ok=True)
    built.write(folder, lambda written: None)
    return built


def imported(folder: Path) -> types.ModuleType:
    """The Python module of a model in `folder`, of its own code."""
    package = f"weft_folder_{next(_COUNT)}"
    spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.modeling_tiny")


def model_of(graph: Graph, folder: Path) -> Any:
    """The model of a graph after its passes: the one that predicts tokens, or the base model, with its weights."""
    folder_of(graph, folder)
    module = imported(folder)
    kinds = ("TinyForCausalLM", "TinyForConditionalGeneration", "TinyModel")
    kind = next(getattr(module, name) for name in kinds if hasattr(module, name))
    return kind.from_pretrained(str(folder)).eval()


def feeds_of(graph: Graph, seq: int = SEQ) -> dict[str, NDArray[Any]]:
    """Random inputs of at most `seq` tokens; positions follow each other, and routers have no noise."""
    seq = min(seq, graph.meta.get("max_positions") or graph.meta.get("context") or seq)
    feeds = EquivalenceCheck(0).make_inputs(graph, seq=seq)
    if "position_ids" in feeds:
        feeds["position_ids"] = np.broadcast_to(np.arange(seq), feeds["input_ids"].shape)
    return {k: np.zeros_like(v) if k.startswith("router_noise") else v for k, v in feeds.items()}


def wanted(graph: Graph, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return interpret(graph, feeds)


def error(got: Tensor, want: NDArray[Any] | Tensor) -> float:
    """The largest difference over the largest number."""
    expected = want.detach().double().numpy() if isinstance(want, Tensor) else want.astype(np.float64)
    assert tuple(got.shape) == expected.shape
    return float(np.abs(got.detach().double().numpy() - expected).max() / max(np.abs(expected).max(), 1e-30))


def ops_of(graph: Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


def tokens_of(graph: Graph, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, graph.meta["vocab"], shape, generator=torch.Generator().manual_seed(seed))


def check_gradients(model: Any, loss: Callable[[], Tensor]) -> None:
    """Compare the gradients of `loss` with those of a model that makes activations again, and with finite differences
    along a random direction."""
    gradients = _gradients(model, loss)
    model.activation_checkpointing_enable()
    again = _gradients(model, loss)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(gradients, again, strict=True))
    step, direction = 1e-6, [torch.randn_like(p) for p in model.parameters()]
    slope = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    found = (_moved(model, direction, step, loss) - _moved(model, direction, -step, loss)) / (2 * step)
    assert abs(found - slope) <= 1e-4 * max(1, abs(slope))


def _gradients(model: Any, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    assert all(p.grad is not None for p in model.parameters())
    return [p.grad.clone() for p in model.parameters()]


def _moved(model: Any, direction: list[Tensor], step: float, loss: Callable[[], Tensor]) -> float:
    """The loss with weights moved by a step."""
    with torch.no_grad():
        for p, d in zip(model.parameters(), direction, strict=True):
            p.add_(d, alpha=step)
        found = loss().item()
        for p, d in zip(model.parameters(), direction, strict=True):
            p.sub_(d, alpha=step)
    return float(found)
