"""The default pipeline: what a graph is compiled through before a target adds its own phase."""

from __future__ import annotations

from weft.ir import Graph, ops

from .analysis.states import has_cache
from .core.base import Pass
from .core.pipeline import Phase, Pipeline
from .library.cache.kv_cache import KvCache
from .library.cache.last_token_logits import LastTokenLogits
from .library.cache.rolling_buffer import RollingBuffer
from .library.cleanup.cse import Cse
from .library.cleanup.dce import Dce
from .library.cleanup.drop_dropout import DropDropout, drops
from .library.cleanup.fold_constants import FoldConstants
from .library.cleanup.quiet_routers import QuietRouters, noises
from .library.fuse.fuse_residual_norm import FuseResidualNorm
from .library.fuse.pack import PackGateUp, PackQkv


def default_pipeline(graph: Graph, max_length: int | None = None, *, trains: bool = False) -> Pipeline:
    """Return the default pipeline for `graph`; ``meta["kind"]`` decides about caches.

    A graph that has caches, or the logits of one token only, needs no pass to get them. Caches of attentions whose
    window is below `max_length`, the longest text (None: the model's context), roll. Noise of routers and
    dropout are left out. What `trains` keeps dropout, and the parameters that the architecture declares: no expression
    of them is folded into one.
    """
    training = {QuietRouters(): bool(noises(graph)), DropDropout(): drops(graph) and not trains}
    first = tuple(p for p, needed in training.items() if needed)
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
