"""The target `torch`: PyTorch source to read, on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.passes import Pipeline

from ..facts import Facts
from ..options import ACTIVATIONS, CACHE_DTYPE, BlockOptions, Options, cache_passes, option
from ..targets import Backend, Place, register

if TYPE_CHECKING:
    from ..torch.build import TorchFolder


@dataclass(frozen=True)
class TorchOptions(BlockOptions):
    """Options of generated models."""

    tensor_parallel: int = option(1, "Write parallel.py, a tensor-parallel plan for N processes")
    activations: Literal["", "fp8"] = option(
        "", "Round what more than 64 tokens multiply with kept FP8 blocks to FP8, too: faster on GPUs from Hopper on"
    )

    cache_dtype: Literal["", "int8", "int4", "fp8"] = option(
        "", "Keep keys and values as integers, with scales fitted to a text by the pass quantize-cache, or in FP8"
    )

    def passes(self) -> str:
        return cache_passes(self.cache_dtype)

    def mark(self, graph: Graph) -> None:
        super().mark(graph)
        if self.activations:
            graph.meta[ACTIVATIONS] = self.activations
        if self.cache_dtype == "fp8":
            graph.meta[CACHE_DTYPE] = self.cache_dtype

    def __post_init__(self) -> None:
        if self.tensor_parallel != 1 and self.cache_dtype:
            raise WeftError("--tensor-parallel divides no caches of fewer bits: leave out --cache-dtype")
        if self.tensor_parallel != 1 and self.keep_blocks:
            raise WeftError("--tensor-parallel divides weights that are numbers, not blocks: leave out --keep-blocks")


@dataclass(frozen=True)
class TorchBackend(Backend):
    """A readable model of PyTorch, and the Triton kernels that it calls."""

    options = TorchOptions
    libraries = ("numpy", "torch")
    is_code = True
    explains = True

    def finish(self, pipeline: Pipeline, dtype: str) -> Pipeline:
        return pipeline  # weights get their dtype where they are stored

    def lowerings(self, op: str) -> list[str]:
        from ..runtime.torch.folder import pytorch

        pytorch()
        from ..torch.program.registry import LOWERINGS

        return [low.name.strip("_") for low in LOWERINGS.get(op, ())]

    def refusals(self, node: Node) -> list[str] | None:
        from ..runtime.torch.folder import pytorch

        pytorch()
        from ..torch.lower.lower import refusals

        return refusals(node)

    def build(self, graph: Graph, dtype: str, length: int, options: Options, notes: list[str]) -> TorchFolder:
        from ..runtime.torch.folder import pytorch

        pytorch()
        from ..torch.build import TorchFolder

        assert isinstance(options, TorchOptions)
        return TorchFolder(graph, dtype, notes, options.tensor_parallel)

    def explain(self, graph: Graph, dtype: str) -> list[str]:
        """Return a line for each kind of node of a decode step on a GPU, and one on this CPU."""
        import torch

        from ..torch.package.explain import explain, explain_cpu
        from ..torch.program.statements import TORCH_NAMES

        kind = getattr(torch, TORCH_NAMES[dtype])
        return [*map(str, explain(graph, kind)), explain_cpu(kind)]

    def place(self, device: str) -> Place:
        from ..runtime.device import by_torch

        return by_torch(device, self)

    def files(self, kind: str) -> tuple[str, ...]:
        return ("model.py",)

    def open(self, facts: Facts, device: str, threads: int | None) -> Any:
        from ..runtime.torch import folder

        return (folder.encoder if facts.kind == "encoder" else folder.decoder)(facts, device, threads)

    def open_offloaded(self, facts: Facts, device: str, threads: int | None, experts: int) -> Any:
        from ..runtime.torch import folder

        return folder.decoder(facts, device, threads, experts)


register(
    TorchBackend(
        "torch",
        "PyTorch source to read, CPU or GPU",
        "PyTorch",
        "any",
        ("f32", "bf16", "f16"),
        phases=("simplify",),  # it reads as the architecture does, and keeps what later calls need by itself
        chosen_on=("cuda", "cpu"),
    )
)
