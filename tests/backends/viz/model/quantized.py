"""A decoder, and its network with quantized weights."""

from __future__ import annotations

import weft
from weft.backends.viz.model.network import Network, build_network
from weft.passes import run_passes

DECODER = weft.Decoder(
    128, 64, 2, weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.GatedMLP(96), weft.RMSNorm()), context=64
)


PIPELINE = "quantize{bits=4, method=rtn}"


def build_quantized_network(pipeline: str = PIPELINE) -> Network:
    return build_network(run_passes(DECODER.graph(), pipeline))
