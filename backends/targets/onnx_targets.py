"""Targets of ONNX models: `ort-cpu` and `ort-cuda` for ONNX Runtime, `onnx` for any runtime."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.ir.op import Growth
from weft.passes import Pass, Phase, Pipeline
from weft.passes.analysis.states import has_cache
from weft.passes.edits.legalization import Accepts
from weft.passes.forms import Form
from weft.passes.library.cache.concat_caches import ConcatCaches, can_append
from weft.passes.library.cache.kv_cache import KvCache
from weft.passes.library.cache.rolling_buffer import FullCaches, is_rolling
from weft.passes.library.cleanup.cse import Cse
from weft.passes.library.quantize.quantize import QuantizeWeights
from weft.passes.library.target.legalize import Legalize
from weft.passes.library.target.outputs import DropOutputs, WidenOutputs, list_losses
from weft.passes.library.target.sides import At, DecoderSide, EncoderSide
from weft.passes.library.target.stored_codes import WidenCodes, has_float4_weights

from .. import cpu
from ..folder_facts import FolderFacts
from ..onnx_runtimes import RUNTIMES, OnnxRuntime
from ..options import ARITHMETIC, BlockOptions, CacheOptions, Options, option
from ..target import MODEL, Backend, Place, register

if TYPE_CHECKING:
    from ..onnx.onnx_folder import OnnxFolder

OLDEST = 17  # the first opset with LayerNormalization

_log = logging.getLogger("weft.runtime")


@dataclass(frozen=True)
class OnnxBackend(Backend):
    """A target of ONNX models; weft runs them in ONNX Runtime."""

    opset: int = 24
    ir_version: int = 11
    caches: str = "buffer"  # buffer: a call writes into them; concat: it returns longer ones
    layout: str = ""  # optimum: names of files, inputs and outputs as in optimum's exports
    lacks: tuple[str, ...] = ()  # operators and forms that the runtime lacks, see `OnnxRuntime`

    options: ClassVar[type[Options]] = CacheOptions
    libraries = ("numpy", "onnx", "onnx-ir")

    def lowerings(self, op: str) -> list[str]:
        from ..onnx.lowering import LOWERINGS

        return [low.name for low in LOWERINGS.get(op, ()) if low.targets(self)]

    def refusals(self, node: Node) -> list[str] | None:
        from ..onnx.lowering import list_refusals

        return list_refusals(node, self)

    def finish(
        self, graph: Graph, pipeline: Pipeline, dtype: str, max_length: int | None, *, trains: bool
    ) -> tuple[Pass, ...]:
        base_passes = super().finish(graph, pipeline, dtype, max_length, trains=trains)
        kind, types = graph.meta.get("kind"), {dtype, *(v.type.dtype.name for v in graph.outputs.values())}
        codes = has_float4_weights(graph) or any(isinstance(p, QuantizeWeights) for p in pipeline.passes)
        losses = tuple(list_losses(graph))
        cached = has_cache(graph) or any(isinstance(p, KvCache) for p in pipeline.passes)
        conditional = {
            ConcatCaches(): cached and self.caches == "concat" and can_append(graph),
            WidenCodes(): codes and self.device == "cpu",  # no CPU kernel supports FLOAT4E2M1
            WidenOutputs(): kind == "encoder" and ("bf16" in types or (bool(self.layout) and "f16" in types)),
            DropOutputs(losses): kind == "encoder-decoder" and losses,  # encoder and decoder would each add to them
        }
        return *base_passes, *(p for p, needed in conditional.items() if needed)

    def forms(self, graph: Graph, options: Options) -> dict[str, Form]:
        from ..onnx.onnx_folder import GENAI, can_run_genai

        legalized, forms = Phase(MODEL, self._legalize()), dict[str, Form]()
        if graph.meta.get("kind") == "encoder-decoder":
            at: At = "packed" if self.layout else "keys"
            for side in (EncoderSide(at), DecoderSide(at)):
                forms[side.kind] = Form(Pipeline((Phase(side.kind, (side,)), legalized)))
            return forms
        forms[MODEL] = Form(Pipeline((legalized,)))
        if not self.layout and can_run_genai(graph) and any(map(is_rolling, graph.nodes)):
            forms[GENAI] = Form(Pipeline((Phase("cache", (FullCaches(),)),)))
            forms[f"{GENAI}-{MODEL}"] = Form(Pipeline((legalized,)), of=GENAI)
        return forms

    def _legalize(self) -> tuple[Pass, ...]:
        return (Legalize(self.name),)

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> OnnxFolder:
        from ..onnx.hub_layout import HubFolder
        from ..onnx.onnx_folder import OnnxFolder

        return (HubFolder if self.layout else OnnxFolder)(forms, self, length, options, notes)

    def place(self, device: str) -> Place:
        from ..runtime.device import choose_ort_place

        return choose_ort_place(device, self)

    def files(self, kind: str) -> tuple[str, ...]:
        return ("model.onnx", "encoder.onnx") if kind == "encoder-decoder" else ("model.onnx",)

    def open(self, facts: FolderFacts, device: str, threads: int | None) -> Any:
        from ..runtime.ort import ort_decoder as folder
        from ..runtime.ort.session import has_cuda_provider

        if facts.kind == "encoder":
            return folder.open_encoder(facts, device, threads)
        if any(state.growth is Growth.APPEND for state in facts.states):
            if device == "cuda":
                raise WeftError(
                    f"{facts.folder} has caches that grow, which weft runs on the CPU: compile with --cache buffer"
                )
            return folder.open_decoder(facts, "cpu", threads)
        if device != "cpu" and has_cuda_provider():
            try:
                from ..runtime.torch import ort_cuda_decoder as onnx
            except ImportError:  # PyTorch is optional: it only makes decoding faster
                _log.info("without PyTorch tokens are chosen on the CPU")
            else:
                return onnx.open_decoder(facts, device, threads)
        return folder.open_decoder(facts, device, threads)


@dataclass(frozen=True)
class StandardOptions(CacheOptions):
    """Options of the target of standard operators, which any runtime may run."""

    opset: int = option(
        0,
        "Use operators of this ONNX opset, from 17; default: the newest, and the model states the oldest with them",
    )
    cache: Literal["concat", "buffer"] = option(
        "concat",
        "How caches grow: a call returns the past with its keys and values appended, or writes into a buffer, which is "
        "faster where a runtime has TensorScatter",
    )
    layout: Literal["", "optimum"] = option(
        "", "Name files, inputs and outputs as in exports of optimum, which optimum and transformers.js open"
    )
    runtime: Literal["", "openvino", "tract", "mnn", "ort-node", "ort-web", "tensorrt", "coreml", "directml", "qnn"] = (
        option(
            "",
            "Restrict the model to the opset, operators and dtypes of this runtime (see docs/runtimes.md)",
            flag="--for",
        )
    )


@dataclass(frozen=True)
class CpuOptions(BlockOptions, CacheOptions):
    """Options of the target of ONNX Runtime on a CPU."""

    prepack: bool = option(
        False, "Also store the weights in the packed layout of this CPU: faster, twice the disk space"
    )
    arithmetic: Literal["", "f32"] = option(
        "", "Multiply by quantized weights in f32, instead of rounding activations to 8 bits: exact, but slower"
    )

    def passes(self) -> dict[str, str]:
        exact = {ARITHMETIC: "keep-blocks{which=quantized}"} if self.arithmetic else {}
        return {**super().passes(), **exact}


@dataclass(frozen=True)
class CpuBackend(OnnxBackend):
    """The target of ONNX Runtime's own operators on a CPU; some kernels depend on the CPU's instruction set."""

    options = CpuOptions

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> OnnxFolder:
        built = super().build(forms, dtype, length, options, notes)
        if built.facts["kept_blocks"] and (slow := cpu.warn_slow_blocks()):
            notes.append(slow)
        return built

    def open(self, facts: FolderFacts, device: str, threads: int | None) -> Any:
        if facts.keeps_blocks and (slow := cpu.warn_slow_blocks()):  # the folder may have been compiled on another CPU
            _log.warning("%s", slow)
        return super().open(facts, device, threads)


@dataclass(frozen=True)
class StandardBackend(OnnxBackend):
    """The target of standard operators, for ONNX Runtime and others: few of them can write into caches."""

    caches: str = "concat"
    restrictions: str = ""  # the options that restrict operators, as the argument `form` of legalize

    options = StandardOptions

    @property
    def subject(self) -> str:
        return f"target {self.name}{f' for {self.restrictions}' * bool(self.restrictions)}"

    def specialize(self, options: Options) -> StandardBackend:
        if not isinstance(options, StandardOptions):
            return self
        runtime, opset = RUNTIMES.get(options.runtime), options.opset
        if opset and not OLDEST <= opset <= (newest := runtime.opset if runtime else self.opset):
            raise WeftError(f"--opset {opset} is unknown: {options.runtime or self.name} has {OLDEST} to {newest}")
        limits = runtime or OnnxRuntime("", "", "", dtypes=self.dtypes)
        return replace(
            self,
            opset=opset or limits.opset,
            caches=options.cache,
            layout=options.layout,
            precision="fp32" if options.layout else "",
            lacks=limits.lacks,
            dtypes=limits.dtypes,
            restrictions="-".join(filter(None, (options.runtime, f"opset{opset}" * bool(opset)))),
        )

    def takes(self, graph: Graph, form: str) -> Accepts:
        if match := re.fullmatch(rf"({'|'.join(RUNTIMES)})?-?(?:opset(\d+))?", form) if form.strip("-") else None:
            options: dict[str, Any] = {"runtime": match[1] or "", "opset": int(match[2] or 0)}
            return self.specialize(StandardOptions(**options)).refusals
        return super().takes(graph, form)

    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> OnnxFolder:
        if self.caches == "concat" and not can_append(forms[""]):
            notes.append("relative_attention cannot append to caches: the model writes into caches of a fixed capacity")
        return super().build(forms, dtype, length, options, notes)

    def _legalize(self) -> tuple[Pass, ...]:
        # Bodies of expanded ops repeat nodes that depend on positions only in every layer.
        return (Legalize(self.name, self.restrictions), *((Cse(),) if self.restrictions else ()))


register(
    CpuBackend(
        "ort-cpu",
        "ONNX Runtime on a CPU",
        "ONNX Runtime",
        "cpu",
        ("f32", "f16"),
        contrib=True,
        slower=("pack-gate-up",),  # splitting a packed product copies it: 2 to 5 % of a prefill
        chosen_on=("cpu",),
    ),
    OnnxBackend(
        "ort-cuda",
        "ONNX Runtime on an NVIDIA GPU",
        "ONNX Runtime",
        "cuda",
        ("f16", "bf16"),
        contrib=True,
        chosen_on=("cuda",),
    ),
    StandardBackend("onnx", "any ONNX runtime: standard operators only", "ONNX Runtime", "cpu", ("f32", "f16", "bf16")),
)
