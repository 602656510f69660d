"""The default pipeline of a graph, and the pipeline ``decode-torch`` of a decode step."""

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
from .library.cleanup.fold_constants import FoldConstants
from .library.cleanup.training_noise import DropDropout, QuietRouters, has_dropout, list_noise_inputs
from .library.decode.embedding import FuseEmbedding
from .library.decode.experts import FuseMixture, FuseRoute
from .library.decode.heads import FuseLatent, FuseQkv
from .library.decode.products import FuseActivation, FuseLinearResidual, PackLinears
from .library.decode.recurrences import FuseRecurrence
from .library.fuse.fuse_norm_linear import FuseNormLinear
from .library.fuse.fuse_residual_norm import FuseResidualNorm, UnfuseResidualNorm
from .library.fuse.pack import PackGateUp, PackQkv
from .library.fuse.unfuse import Unfuse

# One node per kernel of a decode step. The order matters: recurrences and mixtures absorb norms that would otherwise be
# fused with linears; the remaining linears are packed last.
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
    """Return the default pipeline for `graph`: phases simplify and fuse; for decoders and encoder-decoders also cache.

    - simplify: expand fused ops, remove router noise and dropout, dce, cse, fold-constants.
    - fuse: pack-qkv, pack-gate-up, fuse-residual-norm.
    - cache: kv-cache unless `graph` has caches; rolling-buffer if a causal window is below the longest sequence
      (`max_length`, else the model's context, else unlimited); last-token-logits unless ``logits`` has one position.

    With `trains`, dropout stays and fold-constants leaves weights unchanged.
    """
    cleanup = {Unfuse(): any(map(is_fused, graph.nodes)), QuietRouters(): bool(list_noise_inputs(graph))}
    cleanup |= {DropDropout(): has_dropout(graph) and not trains}
    first = tuple(p for p, needed in cleanup.items() if needed)
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
    caching: dict[Pass, bool] = {KvCache(): not has_cache(graph), roll: rolls, LastTokenLogits(): not last}
    cache = tuple(p for p, needed in caching.items() if needed)
    return Pipeline((simplify, fuse, Phase("cache", cache)) if cache else (simplify, fuse))
