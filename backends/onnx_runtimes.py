"""Records of ONNX runtimes: they restrict the operators and dtypes of target `onnx` for one of them (option --for)."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = "DequantizeLinear by blocks"
GATHERED_CODES = "DequantizeLinear of gathered codes"
EXPERT_CODES = "codes of experts"


@dataclass(frozen=True)
class OnnxRuntime:
    """The operators and dtypes that a runtime supports.

    - doc: a description, and advice for running it
    - version: the version in which models were run, or whose documentation was read
    - tried: weft's tests run models in it
    - opset: the opset to use; a runtime may know newer operators, but not as weft uses them
    - lacks: operators of this opset that it refuses or computes differently, and the forms named above
    - dtypes: float dtypes of models
    """

    name: str
    doc: str
    version: str
    tried: bool = True
    opset: int = 24
    lacks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("f32", "f16")


def _describe_provider(name: str, system: str) -> str:
    return f"ONNX Runtime with its {name} provider, on {system}; the CPU runs the other operators"


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        OnnxRuntime(
            "openvino",
            "OpenVINO, on Intel CPUs and GPUs; by default it rounds to bf16, and to 8 bits before quantized weights",
            "2026.4.1",
            lacks=("TensorScatter", GATHERED_CODES),
            dtypes=("f32", "f16", "bf16"),
        ),
        OnnxRuntime(
            "tract",
            "tract, in Rust on small devices; its Attention has no boolean masks and no softcap, hence opset 19",
            "0.23.9",
            opset=19,
            lacks=("Loop", "Scan", BLOCKS),
        ),
        OnnxRuntime(
            "mnn",
            "MNN, on phones; models are converted first, with i32 for i64; its Gelu is inexact, hence opset 19",
            "3.6.1",
            opset=19,
            lacks=("Scan", BLOCKS, EXPERT_CODES),
            dtypes=("f32",),
        ),
        OnnxRuntime("ort-node", "onnxruntime-node", "1.30.0"),
        OnnxRuntime("ort-web", "onnxruntime-web, in WebAssembly; it gets the data file by externalData", "1.31.0"),
        OnnxRuntime("tensorrt", "NVIDIA TensorRT by its ONNX parser", "11", tried=False, opset=22),
        OnnxRuntime("coreml", _describe_provider("CoreML", "macOS and iOS"), "1.31", tried=False, opset=20),
        OnnxRuntime("directml", _describe_provider("DirectML", "Windows"), "1.24", tried=False, opset=20),
        OnnxRuntime("qnn", _describe_provider("QNN", "Snapdragon"), "2.8", tried=False, opset=20),
    )
}
