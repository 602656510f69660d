"""Graphs as targets lower them, by the forms that compiling makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.backends.options import Options
from weft.backends.target import MODEL, TARGETS
from weft.backends.torch.decode import step_source as source
from weft.backends.torch.decode.lower_step import DecodeStep
from weft.backends.torch.lower import lower as lowering
from weft.backends.torch.lower.lower import LoweredGraph
from weft.backends.torch.package import explain as explaining
from weft.backends.torch.package import module
from weft.backends.torch.package import source_folder as export
from weft.backends.torch.package.explain import HOPPER, Explanation
from weft.frontends.app.api.modules import build_module_graphs, build_step_graphs
from weft.ir import Graph
from weft.passes import Report
from weft.passes.forms import derive_graphs


def forms(graph: Graph, target: str, options: Options | None = None, report: Report | None = None) -> dict[str, Graph]:
    """The forms of `graph` that `target` is built from."""
    backend = TARGETS[target]
    return derive_graphs(graph, backend.forms(graph, options or backend.options()), report=report)


def lower(graph: Graph) -> LoweredGraph:
    """The program of `graph` in PyTorch."""
    return lowering.lower(build_module_graphs(graph)[MODEL])


def step_of(graph: Graph) -> DecodeStep | None:
    """The decode step of `graph` in PyTorch, if there is one."""
    made = build_step_graphs(graph)
    return export.lower_step_of(made, lowering.lower(made[MODEL]))


def write_step(graph: Graph, float8_caches: bool = False) -> tuple[str, list[str]]:
    """The text of the decode step of `graph`, and the files of its kernels."""
    made = build_step_graphs(graph)
    lowered = lowering.lower(made[MODEL], float8_caches)
    return source.write_step(lowered, export.lower_step_of(made, lowered))


def build_module(graph: Graph, **place: Any) -> nn.Module:
    """The module of `graph`."""
    return module.build_module(build_module_graphs(graph), **place)


def build_step(graph: Graph, made: nn.Module, **caches: bool) -> Callable[..., torch.Tensor]:
    """The decode step of `graph` over the weights of a module."""
    return module.build_step(build_step_graphs(graph), made, **caches)


def explain(
    graph: Graph, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] | None = HOPPER
) -> list[Explanation]:
    """Lines that tell how a decode step of `graph` is computed."""
    report = Report()
    made = forms(graph, "torch", report=report)
    lowered = lowering.lower(made[MODEL])
    return explaining.explain_step(graph, export.lower_step_of(made, lowered), report, dtype, capability)
