"""The target `torch`: readable PyTorch source, for a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from weft.ir.graph import Graph, Node
from weft.passes import Pass, Phase, Pipeline
from weft.passes.default import FUSE_DECODE
from weft.passes.edits.legalization import Accepts
from weft.passes.forms import Form
from weft.passes.library.cleanup.training_noise import DropDropout, has_dropout
from weft.passes.library.fuse.fuse_residual_norm import UnfuseResidualNorm
from weft.passes.library.target.legalize import Legalize
from weft.passes.library.target.outputs import DropOutputs, list_losses

from ..folder_facts import FolderFacts
from ..options import KEEP_BLOCKS, BlockOptions, Options, list_cache_passes, option
from ..python_names import PythonNames
from ..target import MODEL, Backend, CompiledModel, Place, import_torch, register

STEP = "step"  # the form of a decode step


@dataclass(frozen=True)
class TorchOptions(BlockOptions):
    """Options of generated PyTorch models."""

    activations: Literal["", "fp8"] = option(
        "", "Also round activations of more than 64 tokens to FP8 before kept FP8 blocks: faster on GPUs from Hopper on"
    )

    cache_dtype: Literal["", "int8", "int4", "fp8"] = option(
        "", "Keep keys and values as integers, with scales fitted to a text by the pass quantize-cache, or in FP8"
    )

    def passes(self) -> dict[str, str]:
        requested = {**super().passes(), **list_cache_passes(self.cache_dtype)}
        if self.activations:
            groups = dict.fromkeys((self.keep_blocks, "quantized"))
            requested[KEEP_BLOCKS] = ", ".join(f"keep-blocks{{which={g}, activations=fp8}}" for g in groups if g)
        return requested


@dataclass(frozen=True)
class TorchBackend(Backend):
    """A target of readable PyTorch models and the Triton kernels that they call."""

    options: ClassVar[type[Options]] = TorchOptions
    libraries = ("numpy", "torch")
    is_code = True
    explains = True
    kernels: ClassVar[bool] = True  # folders contain the Triton kernels

    def finish(
        self, graph: Graph, pipeline: Pipeline, dtype: str, max_length: int | None, *, trains: bool
    ) -> tuple[Pass, ...]:
        # f32 here, because weights are cast when they are stored.
        base_passes = super().finish(graph, pipeline, "f32", max_length, trains=trains)
        losses = tuple(list_losses(graph))
        return base_passes if trains or not losses else (*base_passes, DropOutputs(losses))

    def lowerings(self, op: str) -> list[str]:
        import_torch()
        from ..torch.program.registry import LOWERINGS

        return [low.name.strip("_") for low in LOWERINGS.get(op, ()) if self.kernels or not low.kernels]

    def refusals(self, node: Node) -> list[str] | None:
        import_torch()
        from ..torch.lower.lower import list_refusals

        return list_refusals(node, self.kernels)

    def takes(self, graph: Graph, form: str) -> Accepts:
        import_torch()
        from ..torch.decode.lower_step import make_refusal_check as step_takes
        from ..torch.lower.lower import make_refusal_check

        if form == STEP:
            return step_takes(graph)
        super().takes(graph, form)  # raises for other forms
        return make_refusal_check(graph, self.kernels)

    def forms(self, graph: Graph, options: Options) -> dict[str, Form]:
        import_torch()
        from ..torch.decode.lower_step import find_refusal

        forms = {MODEL: Form(self.model_pipeline(PythonNames()))}
        if find_refusal(graph) is None:
            quiet = (DropDropout(),) if has_dropout(graph) else ()  # steps do not train
            phases = Phase(FUSE_DECODE.name, (*quiet, *FUSE_DECODE.passes)), Phase(STEP, (Legalize(self.name, STEP),))
            forms[STEP] = Form(Pipeline(phases), of=MODEL)
        return forms

    def model_pipeline(self, names: PythonNames) -> Pipeline:
        """Return the pipeline that prepares a graph for code generation and includes the pass `names`."""
        return Pipeline((Phase(MODEL, (UnfuseResidualNorm(), names, Legalize(self.name))),))

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> CompiledModel:
        from ..torch.torch_folder import TorchFolder

        assert isinstance(options, TorchOptions)
        return TorchFolder(forms, dtype, options, notes)

    def place(self, device: str) -> Place:
        from ..runtime.device import choose_torch_place

        return choose_torch_place(device, self)

    def files(self, kind: str) -> tuple[str, ...]:
        return ("model.py",)

    def open(self, facts: FolderFacts, device: str, threads: int | None) -> Any:
        from ..runtime.torch import open_torch as folder

        return (folder.open_encoder if facts.kind == "encoder" else folder.open_decoder)(facts, device, threads)

    def open_offloaded(self, facts: FolderFacts, device: str, threads: int | None, experts: int) -> Any:
        from ..runtime.torch import open_torch as folder

        return folder.open_decoder(facts, device, threads, experts)


register(
    TorchBackend(
        "torch",
        "PyTorch source to read, CPU or GPU",
        "PyTorch",
        "any",
        ("f32", "bf16", "f16"),
        phases=("simplify",),  # it stays close to the architecture, and its modules manage their caches themselves
        chosen_on=("cuda", "cpu"),
    )
)
