"""The declarative language: modules whose fields are the specification and whose calls emit ops.

A module's parameters are created by name in the scope that requests them, sizes are inferred, and every op of
`weft.ir.ops` can be mixed with the building blocks: ``from weft.frontends.dsl import linear, module, relu, square``.
A call maps x [batch, seq, dim] to a value of the same shape, unless the module's docstring states other shapes.
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
from .differential import DifferentialAttention, MixtureOfAttention, ScoredKeysAttention
from .ffn import MLP, XIELU, GatedMLP, MoE, Router
from .heads import HeadTransform, TaskHead
from .hybrids import LightningAttention, MemoryBlock, NormedResidual, ParallelHybrid, ShortConv
from .layers import LayerNorm, LearnedPositions, RMSNorm, Sinusoidal, embedding, linear, positions
from .linear_rnns import MLSTM, RGLRU, SLSTM, GatedDeltaNet, RWKV6TimeMix, RWKV7TimeMix, RWKVChannelMix, RWKVTimeMix
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

# attention
__all__ = ["MLA", "Attention", "BlockSparse", "CrossAttention", "DifferentialAttention", "DisentangledAttention"]
__all__ += ["Gate", "LightningIndex", "LinearAttention", "Mask", "MixtureOfAttention", "QKNorm", "RelativeAttention"]
__all__ += ["ScoredKeysAttention", "SpanConvAttention", "TransformerXLAttention", "TransientGlobalAttention"]
__all__ += ["FourierMixing"]
# recurrences
__all__ += ["MLSTM", "RGLRU", "SLSTM", "RWKV6TimeMix", "RWKV7TimeMix", "RWKVChannelMix", "RWKVTimeMix"]
__all__ += ["GatedDeltaNet", "LightningAttention", "Mamba", "Mamba2", "ShortConv", "State", "scan"]
# feed-forwards
__all__ += ["MLP", "XIELU", "GatedMLP", "MoE", "Router", "SplitFeedForward", "silu"]
# blocks
__all__ += ["AdaptedBlock", "AltUpLayer", "Block", "ConvolvedBlock", "GatherStreams", "Initialized", "LayerWithInput"]
__all__ += ["MemoryBlock", "MixtureOfDepths", "NormedResidual", "ParallelHybrid", "Repeat", "ShortcutBlock"]
__all__ += ["SpreadStreams"]
# linear maps, embeddings, norms, positions
__all__ += ["ALiBi", "GroupNorm", "LayerNorm", "LearnedPositions", "embedding", "linear", "positions"]
__all__ += ["PerLayerEmbedding", "PerLayerInput", "PositionalConvolution", "RMSNorm", "RelativeTable", "RoPE"]
__all__ += ["Sinusoidal", "SinusoidalDistances", "T5Bias", "Temperature", "TransientGlobals"]
# models
__all__ += ["AudioEncoder", "Convolution", "Decoder", "Encoder", "EncoderDecoder", "ImageEncoder", "MaskScaling"]
__all__ += ["SoundStem"]
# outputs
__all__ += ["Dense", "HeadTransform", "SentencePooling", "TaskHead", "Unchanged", "UnitLength"]
__all__ += ["WeightedLayerPooling", "WordWeights"]
# building graphs
__all__ += ["building", "contribute", "fill", "initializing", "keep", "kept", "module", "named", "normal", "param"]
__all__ += ["provided", "providing", "scope", "trace", "uniform"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'weft.frontends.dsl' has no attribute {name!r}")
    return getattr(ops, name)
