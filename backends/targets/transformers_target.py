"""The target `transformers`: folders with custom code that Hugging Face transformers loads."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.passes import Phase, Pipeline
from weft.passes.analysis.states import SOUND
from weft.passes.forms import Form
from weft.passes.library.target.sides import DecoderSide, EncoderSide

from ..folder_facts import FolderFacts
from ..options import Options, option
from ..python_names import PythonNames
from ..target import MODEL, Backend, CompiledModel, Place, import_torch, register
from .torch_target import TorchBackend


@dataclass(frozen=True)
class TransformersOptions(Options):
    """Options of folders for transformers."""

    class_name: str = option("", "Name of the classes: NAMEConfig, NAMEModel, NAMEForCausalLM")

    def __post_init__(self) -> None:
        if self.class_name and (not self.class_name.isidentifier() or keyword.iskeyword(self.class_name)):
            raise WeftError(f"--class-name {self.class_name!r} is not a valid class name; give letters and digits")


@dataclass(frozen=True)
class TransformersBackend(TorchBackend):
    """A target of models with custom code for transformers and the libraries built on it: PEFT, TRL, vLLM, SGLang."""

    options = TransformersOptions
    is_code = False
    runs = False
    trains = True
    own_code = True
    kernels = False

    def forms(self, graph: Graph, options: Options) -> dict[str, Form]:
        import_torch()
        from ..torch.transformers.lower.lower_base_and_head import RESERVED_ATTRIBUTES, USUAL

        forms = {MODEL: Form(self.model_pipeline(PythonNames(RESERVED_ATTRIBUTES, USUAL)))}
        if graph.meta.get("kind") == "encoder-decoder":
            if any(name in graph.inputs for name in SOUND):
                raise WeftError(f"target {self.name} supports only text encoders; that of {graph.name} reads sound")
            for side in (DecoderSide("states"), EncoderSide("states")):
                forms[side.kind] = Form(Pipeline((Phase(side.kind, (side,)),)), of=MODEL)
        return forms

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> CompiledModel:
        from ..torch.transformers.transformers_folder import TransformersFolder

        assert isinstance(options, TransformersOptions)
        return TransformersFolder(forms, dtype, length, options.class_name, notes)

    def place(self, device: str) -> Place:
        return Backend.place(self, device)

    def files(self, kind: str) -> tuple[str, ...]:
        return ("config.json",)

    def open(self, facts: FolderFacts, device: str, threads: int | None) -> Any:
        raise WeftError(
            f"weft cannot run {facts.folder}, compiled for transformers: load it with from_pretrained, or compile it "
            f"again with `weft compile {facts.folder} -o OUT`"
        )

    def open_offloaded(self, facts: FolderFacts, device: str, threads: int | None, experts: int) -> Any:
        return Backend.open_offloaded(self, facts, device, threads, experts)


register(
    TransformersBackend(
        "transformers",
        "a folder with its own code for transformers",
        "transformers",
        "any",
        ("f32", "bf16", "f16"),
        phases=("simplify",),
    )
)
