"""The target `web`: a folder for transformers.js in Node, and with a page for browsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from weft.ir.errors import WeftError
from weft.ir.graph import Graph

from ..options import Options, option
from ..target import Variant, register
from .onnx_targets import OnnxBackend

if TYPE_CHECKING:
    from ..onnx.onnx_folder import OnnxFolder

PRECISIONS: dict[str, tuple[str, str | None]] = {  # names of transformers.js: (dtype, --weights)
    "fp32": ("f32", None),
    "fp16": ("f16", None),
    "q8": ("f32", "int8"),
    "q4": ("f32", "int4"),
    "q4f16": ("f16", "int4"),
    "q2": ("f32", "int2"),
}


@dataclass(frozen=True)
class WebOptions(Options):
    """Options of folders for transformers.js."""

    precisions: str = option(
        "", f"Precisions of the models in the folder, the default first, of {', '.join(PRECISIONS)}; default: q4"
    )
    javascript: str = option(
        "", "A node_modules folder with @huggingface/transformers to copy from; default: the page loads it from a CDN"
    )
    page: Literal["", "live"] = option("", "live: the model and scripts of a page that `weft viz --live` writes")


@dataclass(frozen=True)
class WebBackend(OnnxBackend):
    """The target of transformers.js. Attention and norms are operators of ONNX Runtime, which has WebGPU kernels for
    them; weights are decoded by DequantizeLinear, as WebAssembly multiplies slowly by codes: ONNX Runtime fuses it with
    products in Node and on GPUs; in WebAssembly an option of its session decodes the weights once."""

    caches: str = "concat"
    layout: str = "optimum"
    precision: str = "q4"

    options = WebOptions

    def list_variants(self, options: Options, dtype: str | None, weights: str | None) -> list[Variant]:
        names = [name.strip() for name in getattr(options, "precisions", "").split(",") if name.strip()]
        if dtype is None and weights is None:
            names = names or ["q4"]
        elif names:
            raise WeftError("--precisions states dtype and weights of each model: leave out --dtype and --weights")
        else:
            kind = (weights or "").partition("{")[0].strip() or None
            names = [n for n, precision in PRECISIONS.items() if precision == (self.dtype(dtype), kind)]
            if not names:
                pairs = ", ".join(f"{d} {w or ''}".strip() for d, w in PRECISIONS.values())
                raise WeftError(f"transformers.js has no name for {self.dtype(dtype)} {kind or ''}; it has {pairs}")
            return [Variant(replace(self, precision=names[0]), dtype, weights)]
        if unknown := [name for name in names if name not in PRECISIONS]:
            raise WeftError(f"--precisions {unknown[0]!r} is unknown: choose of {', '.join(PRECISIONS)}")
        return [Variant(replace(self, precision=name), *PRECISIONS[name]) for name in dict.fromkeys(names)]

    def specialize(self, options: Options) -> WebBackend:
        return replace(self, layout="") if getattr(options, "page", "") == "live" else self

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> OnnxFolder:
        from ..onnx.web import WebFolder
        from ..onnx.web.live_folder import LiveFolder

        return (WebFolder if self.layout else LiveFolder)(forms, self, length, options, notes)


register(
    WebBackend(
        "web", "transformers.js in Node and browsers", "ONNX Runtime", "cpu", ("f32", "f16"), contrib=True, decodes=True
    )
)
