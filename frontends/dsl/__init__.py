"""The declarative language: modules whose fields are the specification and whose calls emit ops.

A module's parameters are created by name in the scope that requests them, sizes are inferred, and every op of
`weft.ir.ops` can be mixed with the building blocks: ``from weft.frontends.dsl import linear, module, relu, square``.
"""

from typing import Any

from weft.ir import ops

from .attention import Attention, BlockSparse, Gate, LightningIndex, Mask, QKNorm
from .blocks import AdaptedBlock, Block, Initialized, MixtureOfDepths, Repeat, ShortcutBlock
from .build import (
    building,
    contribute,
    fill,
    initializing,
    keep,
    kept,
    module,
    named,
    normal,
    param,
    provided,
    providing,
    scope,
    trace,
    uniform,
)
from .delta_rule import GatedDeltaNet
from .differential import DifferentialAttention, MixtureOfAttention, ScoredKeysAttention
from .ffn import MLP, XIELU, GatedMLP, MoE, Router
from .heads import HeadTransform, TaskHead
from .hybrids import LightningAttention, MemoryBlock, NormedResidual, ParallelHybrid, ShortConv
from .layers import LayerNorm, LearnedPositions, RMSNorm, Sinusoidal, embedding, linear, positions
from .linear_rnns import MLSTM, RGLRU, SLSTM, RWKV6TimeMix, RWKV7TimeMix, RWKVChannelMix, RWKVTimeMix
from .mixers import (
    MLA,
    DisentangledAttention,
    FourierMixing,
    LinearAttention,
    RelativeAttention,
    SpanConvAttention,
    TransformerXLAttention,
    TransientGlobalAttention,
)
from .models import Decoder, Encoder, MaskScaling
from .outputs import Dense, SentencePooling, Unchanged, UnitLength, WeightedLayerPooling, WordWeights
from .position_bias import ALiBi, RelativeTable, SinusoidalDistances, T5Bias, TransientGlobals
from .recurrence import State, scan
from .rotary import RoPE, Temperature
from .seq2seq import CrossAttention, EncoderDecoder
from .signals import (
    AudioEncoder,
    Convolution,
    ConvolvedBlock,
    GroupNorm,
    ImageEncoder,
    PositionalConvolution,
    SoundStem,
)
from .state_space import Mamba, Mamba2
from .streams import (
    AltUpLayer,
    GatherStreams,
    LayerWithInput,
    PerLayerEmbedding,
    PerLayerInput,
    SplitFeedForward,
    SpreadStreams,
)

silu = ops.swish  # its β is 1 by default

__all__ = [
    "MLA",
    "MLP",
    "MLSTM",
    "RGLRU",
    "SLSTM",
    "XIELU",
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
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'weft.frontends.dsl' has no attribute {name!r}")
    return getattr(ops, name)
