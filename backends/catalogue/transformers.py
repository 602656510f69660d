"""The target `transformers`: a folder with its own code that Hugging Face transformers loads."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.passes import Pipeline

from ..facts import Facts
from ..options import Options, option
from ..targets import Backend, register

if TYPE_CHECKING:
    from ..transformers.build import TransformersFolder


@dataclass(frozen=True)
class TransformersOptions(Options):
    """Options of folders for transformers."""

    class_name: str = option("", "Name of the classes: NAMEConfig, NAMEModel, NAMEForCausalLM")

    def __post_init__(self) -> None:
        if self.class_name and (not self.class_name.isidentifier() or keyword.iskeyword(self.class_name)):
            raise WeftError(f"--class-name {self.class_name!r} is no name for a class; give letters and digits")


@dataclass(frozen=True)
class TransformersBackend(Backend):
    """A model with its own code for transformers and what builds upon it: PEFT, TRL, vLLM, SGLang."""

    options = TransformersOptions
    libraries = ("numpy", "torch")
    runs = False
    trains = True
    explains = True
    own_code = True

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

    def build(self, graph: Graph, dtype: str, length: int, options: Options, notes: list[str]) -> TransformersFolder:
        from ..runtime.torch.folder import pytorch

        pytorch()
        from ..transformers.build import TransformersFolder

        assert isinstance(options, TransformersOptions)
        return TransformersFolder(graph, dtype, length, options.class_name, notes)

    def explain(self, graph: Graph, dtype: str) -> list[str]:
        """Return a line for each engine that reads such folders: whether it takes the model, or why not."""
        from ..transformers.build import TransformersFolder

        return TransformersFolder(graph, dtype, 1, "", []).explained

    def files(self, kind: str) -> tuple[str, ...]:
        return ("config.json",)

    def open(self, facts: Facts, device: str, threads: int | None) -> Any:
        raise WeftError(
            f"{facts.folder} is for transformers, which loads it with from_pretrained; to run it by weft, compile: "
            f"weft compile {facts.folder} -o OUT"
        )


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
