"""Pipelines by name: the default one, which a graph is compiled through before a target adds its own phase, and that of
a decode step."""

from __future__ import annotations

from weft.ir import Graph, ops

from .analysis.states import has_cache
from .core.base import Pass
from .core.pipeline import PIPELINES, Phase, Pipeline
from .edits.legalization import is_fused
from .library.cache.kv_cache import KvCache
from .library.cache.last_token_logits import LastTokenLogits
from .library.cache.rolling_buffer import RollingBuffer
from .library.cleanup.cse import Cse
from .library.cleanup.dce import Dce
from .library.cleanup.drop_dropout import DropDropout, drops
from .library.cleanup.fold_constants import FoldConstants
from .library.cleanup.quiet_routers import QuietRouters, noises
from .library.decode.embedding import FuseEmbedding
from .library.decode.experts import FuseMixture, FuseRoute
from .library.decode.heads import FuseLatent, FuseQkv
from .library.decode.products import FuseActivation, FuseLinearResidual, PackLinears
from .library.decode.recurrences import FuseRecurrence
from .library.fuse.fuse_norm_linear import FuseNormLinear
from .library.fuse.fuse_residual_norm import FuseResidualNorm
from .library.fuse.pack import PackGateUp, PackQkv
from .library.fuse.unfuse import Unfuse
from .library.fuse.unfuse_residual_norm import UnfuseResidualNorm

# A node for each kernel of a decode step. The order matters: recurrences and mixtures take up norms that would
# otherwise be fused with products; what is left of these is packed last.
FUSE_DECODE = Phase(
    "fuse-decode",
    (
        *(FuseRecurrence(), FuseMixture(), FuseNormLinear(fold=False), FuseRoute(), FuseActivation()),
        *(FuseQkv(), FuseLatent(), FuseLinearResidual(), PackLinears(), FuseEmbedding()),
    ),
)
SIMPLIFY = (UnfuseResidualNorm(), Dce(), Cse(), FoldConstants())
PIPELINES.add("decode-torch", Pipeline((Phase("simplify", SIMPLIFY), FUSE_DECODE)))


def default_pipeline(graph: Graph, max_length: int | None = None, *, trains: bool = False) -> Pipeline:
    """Return the default pipeline for `graph`; ``meta["kind"]`` decides about caches.

    A graph that has caches, or the logits of one token only, needs no pass to get them. Caches of attentions whose
    window is below `max_length`, the longest text (None: the model's context), roll. Fused ops are taken apart, noise
    of routers and dropout left out. What `trains` keeps dropout, and the parameters that the architecture declares: no
    expression of them is folded into one.
    """
    given = {Unfuse(): any(map(is_fused, graph.nodes)), QuietRouters(): bool(noises(graph))}
    given |= {DropDropout(): drops(graph) and not trains}
    first = tuple(p for p, needed in given.items() if needed)
    simplify = Phase("simplify", (*first, Dce(), Cse(), FoldConstants(weights=not trains)))
    fuse = Phase("fuse", (PackQkv(), PackGateUp(), FuseResidualNorm()))
    if graph.meta.get("kind") not in ("decoder", "encoder-decoder"):
        return Pipeline((simplify, fuse))
    logits = graph.outputs.get("logits")
    last = logits is not None and logits.shape[1:2] == (1,)
    context = graph.meta.get("context")
    limit = max_length or context
    local = [n.attrs for n in graph.nodes if n.op is ops.attention and n.attrs["window"] is not None]
    local = [a for a in local if a["causal"] and not a["rolling"]]
    rolls = any(limit is None or a["window"] < limit for a in local)
    roll = RollingBuffer(None if max_length == context else max_length)
    wanted: dict[Pass, bool] = {KvCache(): not has_cache(graph), roll: rolls, LastTokenLogits(): not last}
    cache = tuple(p for p, needed in wanted.items() if needed)
    return Pipeline((simplify, fuse, Phase("cache", cache)) if cache else (simplify, fuse))
