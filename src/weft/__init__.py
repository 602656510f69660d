"""weft: a compiler of transformers from declarations or checkpoints, through a graph, to PyTorch or ONNX.

The names below, and every op, are imported on first use, so that `import weft` is fast. Type checkers and editors read
__init__.pyi, which `make stubs` generates from the code.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "weft.frontends.dsl": (
        "ALiBi",
        "AdaptedBlock",
        "AltUpLayer",
        "Attention",
        "AudioEncoder",
        "Block",
        "BlockSparse",
        "Convolution",
        "ConvolvedBlock",
        "CrossAttention",
        "Decoder",
        "Dense",
        "DifferentialAttention",
        "DisentangledAttention",
        "Encoder",
        "EncoderDecoder",
        "FourierMixing",
        "Gate",
        "GatedDeltaNet",
        "GatedMLP",
        "GatherStreams",
        "GroupNorm",
        "HeadTransform",
        "ImageEncoder",
        "Initialized",
        "LayerNorm",
        "LayerWithInput",
        "LearnedPositions",
        "LightningAttention",
        "LightningIndex",
        "LinearAttention",
        "MLA",
        "MLP",
        "MLSTM",
        "Mamba",
        "Mamba2",
        "Mask",
        "MaskScaling",
        "MemoryBlock",
        "MixtureOfAttention",
        "MixtureOfDepths",
        "MoE",
        "NormedResidual",
        "ParallelHybrid",
        "PerLayerEmbedding",
        "PerLayerInput",
        "PositionalConvolution",
        "QKNorm",
        "RGLRU",
        "RMSNorm",
        "RWKV6TimeMix",
        "RWKV7TimeMix",
        "RWKVChannelMix",
        "RWKVTimeMix",
        "RelativeAttention",
        "RelativeTable",
        "Repeat",
        "RoPE",
        "Router",
        "SLSTM",
        "ScoredKeysAttention",
        "SentencePooling",
        "ShortConv",
        "ShortcutBlock",
        "Sinusoidal",
        "SinusoidalDistances",
        "SoundStem",
        "SpanConvAttention",
        "SplitFeedForward",
        "SpreadStreams",
        "State",
        "T5Bias",
        "TaskHead",
        "Temperature",
        "TransformerXLAttention",
        "TransientGlobalAttention",
        "TransientGlobals",
        "Unchanged",
        "UnitLength",
        "WeightedLayerPooling",
        "WordWeights",
        "XIELU",
        "building",
        "contribute",
        "embedding",
        "fill",
        "initializing",
        "keep",
        "kept",
        "linear",
        "module",
        "named",
        "normal",
        "param",
        "positions",
        "provided",
        "providing",
        "scan",
        "scope",
        "silu",
        "trace",
        "uniform",
    ),
    "weft.frontends": ("load_source",),
    "weft.frontends.app.api.bisect.bisection": ("bisect",),
    "weft.frontends.app.api.certificate": ("certify",),
    "weft.frontends.app.api.compile": ("compile",),
    "weft.frontends.app.api.verify.evaluation": ("evaluate",),
    "weft.frontends.app.api.export": ("export",),
    "weft.frontends.app.api.initialization": ("initialize", "learning_rates"),
    "weft.frontends.app.api.inspect.counting": ("inspect",),
    "weft.frontends.app.api.modules": ("state_dict", "torch", "with_weights"),
    "weft.frontends.app.api.draw.notebook": ("show",),
    "weft.frontends.app.api.observe.trace": ("open_tracer", "trace_text"),
    "weft.frontends.app.api.training.compare": ("compare",),
    "weft.frontends.app.api.training.distil": ("distil", "heal"),
    "weft.frontends.app.api.training.training_settings": ("DistilSettings", "TrainingSettings"),
    "weft.frontends.app.api.training.train": ("resume", "train"),
    "weft.frontends.app.api.draw.pictures": ("draw",),
    "weft.frontends.app.api.verify.verification": ("verify_folder",),
    "weft.backends.runtime": ("load",),
    "weft.ir": ("WeftError",),
    "weft.passes": ("run_passes",),
}
_HOME = {name: home for home, names in _PUBLIC.items() for name in names}
_FOLDERS = ("backends", "frontends", "ir", "passes")

# Not imported by `from weft import *`: they would replace a builtin, or a module that the importer may have imported.
_SHADOWING = ("bisect", "compile", "inspect", "torch", "trace")

__all__ = ["__version__", *(name for name in _HOME if name not in _SHADOWING)]


def __getattr__(name: str) -> Any:
    if name in (*_FOLDERS, "ops"):
        return importlib.import_module(f"weft.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    ops = importlib.import_module("weft.ir.ops").OPS if name[0] != "_" else {}  # every op is a public name
    if name in ops:
        return ops[name]
    import difflib

    near = difflib.get_close_matches(name, [*_HOME, *ops], 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise AttributeError(f"module 'weft' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_FOLDERS, "ops"})
