"""Two targets: one that runs as another does, by other facts; and one of its own, which writes the graph as text."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.backends.options import Options, option
from weft.backends.target import TARGETS, Backend, register


@dataclass(frozen=True)
class TextOptions(Options):
    """Options of the target `text`."""

    case: Literal["lower", "upper"] = option("lower", "Write the heading in capital letters, or not")
    heading: str = option("graph", "Write these words above the graph")


class TextFile:
    """The text of a graph."""

    def __init__(self, graph: Any, options: TextOptions) -> None:
        heading = options.heading.upper() if options.case == "upper" else options.heading
        self._text = f"# {heading}\n{graph}\n"
        self.trace, self.facts, self.weight_bytes = [], {"heading": heading}, 0

    def write(self, folder: Any, step: Any) -> None:
        (folder / "model.weft").write_text(self._text, encoding="utf-8")


@dataclass(frozen=True)
class TextBackend(Backend):
    """The text form of graphs."""

    options = TextOptions

    def lowerings(self, op: str) -> list[str]:
        return ["text"]

    def refusals(self, node: Any) -> None:
        return None

    def build(self, forms: Any, dtype: str, length: int, options: Any, notes: list[str]) -> TextFile:
        notes.append(f"its texts have {length} tokens at most")
        return TextFile(forms["model"], options)

    def files(self, kind: str) -> tuple[str, ...]:
        return ("model.weft",)


def add() -> None:
    """Register both."""
    register(replace(TARGETS["onnx"], name="onnx-half", doc="ONNX in f16", dtypes=("f16",)))
    register(TextBackend("text", "the graph to read", "nothing", "any", ("f32",), phases=("simplify",)))
