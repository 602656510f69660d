"""The text form of graphs. It is readable and complete: ``parse(str(graph))`` equals the graph. ::

    graph smollm2 {
      meta kind = "decoder"
      input %input_ids: i64[batch, seq]
      param %embed.weight: f32[49152, 576] = source("token_embd.weight")
      scope layers.0.attn
        %.q: f32[batch, seq, 576] = linear(%layers.0.norm, %.q.weight)
      output logits = %lm_head
    }

A leading dot abbreviates the current scope. Attributes that equal their default are omitted; absent operands are ``_``.
Never here: the semantics of ops, other file formats.
"""

from ..graph import Graph
from .parser import parse

__all__ = ["parse", "print_graph"]


def print_graph(graph: Graph) -> str:
    """Return the text form of `graph`: the same as ``str(graph)``."""
    return str(graph)
