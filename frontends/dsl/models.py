"""Complete models: the decoder, which predicts the next token, and the encoder, which computes hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from weft.ir import ops
from weft.ir.display import Displayable
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Value
from weft.ir.ops.elementwise import mask_fill
from weft.ir.types import TensorType, dtypes, sizes

from .build import Layer, get_builder, keep, module, named, param, provided, providing, trace_as
from .checks import need, need_int
from .heads import TaskHead
from .layers import LayerNorm, LearnedPositions, Norm, RMSNorm, Sinusoidal, embedding, linear
from .outputs import SentencePooling
from .position_bias import RelativeTable, SinusoidalDistances, T5Bias, TransientGlobals
from .streams import PerLayerEmbedding

Positions = LearnedPositions | Sinusoidal
IDS = TensorType(dtypes.i64, (sizes.sym("batch"), sizes.sym("seq")))


def _check_settings(model: Decoder | Encoder) -> None:
    check_layers(model)
    if model.positions is not None and model.context is not None:
        fits = model.context <= model.positions.length
        need(model, fits, f"context={model.context} exceeds length={model.positions.length} of positions")
    bias = model.position_bias
    need(model, bias is None or bias.heads is not None, "position_bias needs heads=..., as all layers share it")


def check_layers(model: Any) -> None:
    """Raise WeftError unless `model` has either a number of layers and a block, or a non-empty list of layers."""
    if isinstance(model.layers, int):
        need_int(model, "layers")
        need(model, model.block is not None, f"layers={model.layers} needs block=..., which is repeated")
    else:
        fits = isinstance(model.layers, Sequence) and not isinstance(model.layers, str)
        need(model, fits, f"layers={model.layers!r} must be a whole number or a list of modules")
        need(model, model.block is None, "layers is a list, so block must be left out")
        need(model, len(model.layers) > 0, "layers is empty, but must have at least one module")
    for i, layer in enumerate(list_layers(model)):
        fits = callable(layer) and not isinstance(layer, type)
        need(model, fits, f"layers[{i}]={layer!r} is not a module")


def list_layers(model: Any) -> list[Any]:
    """Return the modules of the layers of a `model` with fields layers and block, in order."""
    return [model.block] * model.layers if isinstance(model.layers, int) else list(model.layers)


def _embed(model: Decoder | Encoder, ids: Value, table: Value, types: Value | None = None) -> Value:
    """Return the embeddings [batch, seq, width] of `ids` [batch, seq] in `table` [vocab, width], after the steps that
    `model` has: mask scaling, scale, token `types` [batch, seq], positions, norm."""
    x = embedding(ids, table)
    if isinstance(model, Encoder) and model.mask_scaling is not None:
        x = model.mask_scaling(x, ids)
    if model.embed_scale != 1:
        x = ops.affine(x, by=model.embed_scale, name="embed_scaled")
    if types is not None and isinstance(model, Encoder):
        rows = embedding(types, model.token_types, x.width, "token_types")
        x = ops.add(x, rows, name="token_types_added")
    first = isinstance(model, Decoder) and model.embed_norm_first
    for step in (model.embed_norm, model.positions) if first else (model.positions, model.embed_norm):
        x = x if step is None else step(x)
    return x


@contextlib.contextmanager
def provide_positions(x: Value) -> Iterator[None]:
    """Provide the positions 0, 1, … of the tokens of x [batch, seq, ...] to modules called inside the block.
    Afterwards, positions that no module reads are erased from the graph."""
    indices = ops.iota(x, axis=1, name="position_index")
    row = ops.unsqueeze(indices, axes=(0,), name="position_row")
    consecutive = ops.expand(row, shape=x.shape[:2], name="position_ids")
    with providing(positions=consecutive, position_row=row):
        yield
    for value in (consecutive, row, indices):
        if value.producer and not value.uses:
            get_builder().graph.erase(value.producer)


def _run_layers(model: Decoder | Encoder, x: Value, per_layer: Sequence[Value] = ()) -> Value:
    """Apply the layers to x [batch, seq, dim] and return the result; store x and all outputs as ``hidden_states``.
    Provide the model's ``position_bias``, x as ``embedded``, and per_layer[i] as ``per_layer`` to layer i."""
    states = [x]
    facts = {} if model.position_bias is None else {"position_bias": model.position_bias(x)}
    with providing(embedded=x, **facts):
        for i, layer in enumerate(list_layers(model)):
            with providing(**{"per_layer": per_layer[i]} if per_layer else {}):
                y = named(layer, f"layers.{i}")(x)
            if y.type != x.type:
                raise WeftError(f"layers.{i} maps {x.type} to {y.type}, but a layer must keep the type of its input")
            states.append(x := y)
    keep("hidden_states", *states)
    return x


def _find_embedding_table(model: Decoder | Encoder) -> Value:
    """Return the embedding table that an enclosing model shares, else the parameter embed.weight [vocab, embed_dim or
    dim]. WeftError if `embed_dim` is set and is not the width of the shared table."""
    shared, narrow = provided("embedding"), getattr(model, "embed_dim", None)
    if shared is not None and narrow not in (None, shared.width):
        raise WeftError(f"embed_dim={narrow} must be {shared.width}, the width of the shared embedding")
    return param("embed.weight", (model.vocab, narrow or model.dim)) if shared is None else shared


def get_max_length(model: Decoder | Encoder) -> int | None:
    """Return the maximum sequence length: `context`, else the length of the position table; None without a limit."""
    return model.context or (None if model.positions is None else model.positions.length)


def describe_model(model: Decoder | Encoder, graph: Graph, kind: str) -> None:
    """Store `kind`, model_type (the graph's name), vocab, context, and max_positions (the length of the position table,
    if there is one) in graph.meta, and the entries of the head of `model`."""
    graph.meta.update(kind=kind, model_type=graph.name, vocab=model.vocab, context=get_max_length(model))
    if model.positions is not None:
        graph.meta["max_positions"] = model.positions.length
    if model.head is not None:
        model.head.describe(graph)


@module
class Decoder(Displayable):
    """A decoder-only language model: embedding, layers, final norm, output head.

    - vocab, dim: size and width of the embedding. context: the maximum sequence length.
    - layers: the number of copies of `block`, or a list of modules.
    - embed_scale, positions, embed_norm: applied to the embeddings in this order; with `embed_norm_first` the norm
      comes before the positions (BlenderbotSmall).
    - position_bias: a term of the scores in every self-attention without a `bias` of its own.
    - per_layer: a further embedding for every layer, which the layer's `PerLayerInput` reads.
    - spread, gather: maps from x to the streams between layers, and back (`SpreadStreams`, `GatherStreams`).
    - final_norm: True means the norm of the last block, `RMSNorm` if it has none, no norm after a post-norm block.
    - head_transform: a module before the output head ``lm_head``. head_bias: ``lm_head`` has a bias. tie_embeddings:
      the weight of ``lm_head`` is the embedding.
    - logit_scale, logit_softcap: the logits are multiplied by the scale, then limited to softcap · tanh(l / softcap).
    - head: a head that scores sequences or tokens in one pass, in place of next-token logits and without caches.
    """

    vocab: int
    dim: int
    layers: int | Sequence[Layer]
    block: Layer | None = None
    tie_embeddings: bool = False
    final_norm: Norm | bool = True
    positions: Positions | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    embed_norm_first: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    context: int | None = None
    position_bias: T5Bias | None = None
    per_layer: PerLayerEmbedding | None = None
    spread: Layer | None = None
    gather: Layer | None = None
    head_transform: Layer | None = None
    head: TaskHead | None = None

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(self, input_ids: Value, attention_mask: Value | None = None) -> Any:
        """Map input_ids [batch, seq] to logits [batch, seq, vocab].

        With a `head`, map input_ids and attention_mask [batch, seq] (0: right padding) to last_hidden_state and scores.
        """
        if self.head is None:
            return self._compute_logits(self._compute_states(input_ids, table := _find_embedding_table(self)), table)
        with provide_positions(input_ids):  # causal attention does not see padding on the right
            x = self._compute_states(input_ids, table := _find_embedding_table(self))
        return {"last_hidden_state": x, **self.head(x, input_ids, attention_mask, None, table)}

    def _compute_states(self, input_ids: Value, table: Value) -> Value:
        x = _embed(self, input_ids, table)
        per_layer = [] if self.per_layer is None else self.per_layer(x, input_ids, len(list_layers(self)))
        x = _run_layers(self, x if self.spread is None else self.spread(x), per_layer)
        x = x if self.gather is None else self.gather(x)
        norm = self._find_last_norm() if self.final_norm is True else self.final_norm
        if norm:
            x = named(norm, "final_norm")(x)
        return x

    def _compute_logits(self, x: Value, table: Value) -> Value:
        x = x if self.head_transform is None else self.head_transform(x)
        logits = linear(x, table if self.tie_embeddings else self.vocab, "lm_head", self.head_bias)
        if self.logit_scale != 1:
            logits = ops.affine(logits, by=self.logit_scale, name="logits_scaled")
        if self.logit_softcap is not None:
            cap = self.logit_softcap
            logits = ops.affine(ops.tanh(ops.affine(logits, by=1 / cap)), by=cap, name="logits_capped")
        return logits

    def _find_last_norm(self) -> Norm | None:
        last = (list_layers(self) or [None])[-1]
        if getattr(last, "arrangement", "pre") == "post":
            return None
        norm = getattr(last, "norm", None)
        return norm if isinstance(norm, (RMSNorm, LayerNorm)) else RMSNorm()

    def graph(self, seed: int = 0, name: str = "decoder") -> Graph:
        """Return the IR graph: inputs input_ids i64[batch, seq] (and position_ids if a module reads positions), output
        logits [batch, seq, vocab]; with a `head`, inputs input_ids and attention_mask, outputs as in `__call__`.

        Parameters have recipes for random initial values with `seed`; nothing is evaluated.

        Raises:
            WeftError: if settings do not fit; the message names the module and the setting.
        """
        inputs = ["input_ids"] if self.head is None else ["input_ids", "attention_mask"]
        graph = trace_as(self, dict.fromkeys(inputs, IDS), seed, name, "logits")
        describe_model(self, graph, "decoder" if self.head is None else "encoder")  # an encoder has no caches
        return graph


@module
class MaskScaling:
    """A scaling of embeddings by (1 − `trained`)/(1 − share of mask tokens in the sequence); mask tokens become 0.

    It compensates for a share of mask tokens (of the id `token`) that differs from the share `trained` in training, by
    default 80 % of 15 % (Rives 2021, ESM). The `mask_scaling` of an `Encoder`.
    """

    token: int
    trained: float = 0.15 * 0.8

    def __call__(self, x: Value, ids: Value) -> Value:
        """Map x [batch, seq, dim] and the ids [batch, seq] of its tokens to a value of the shape of x."""
        mask = provided("key_mask")
        if mask is None:
            raise WeftError("MaskScaling reads complete sequences: it must be in an Encoder")
        masks = ops.equal(ids, ops.affine(ids, by=0, plus=self.token))
        masks, mask = (ops.unsqueeze(ops.cast(v, to=dtypes.bool_), axes=(2,)) for v in (masks, mask))
        ones = ops.affine(ops.slice(x, axis=2, start=0, stop=1), by=0.0, plus=1.0)  # in the dtype of x
        counts = (ops.sum(mask_fill(counted, ones), axes=(1,), keepdims=True) for counted in (masks, mask))
        unmasked = ops.affine(ops.div(*counts), by=-1.0, plus=1.0)
        return mask_fill(ops.logical_not(masks), ops.div(ops.affine(x, by=1 - self.trained), unmasked))


@module
class Encoder(Displayable):
    """A bidirectional encoder: embedding with positions and token types, layers, optional pooler (Devlin 2018).

    - vocab, dim, layers, block, context, position_bias: as in `Decoder`.
    - embed_dim: the width of all embeddings, if not `dim`; ``embed_proj`` maps them to `dim` (Lan 2019, ALBERT).
    - embed_scale, token_types, positions, embed_norm: applied to the embeddings in this order; `token_types` is the
      number of segment types (0: no input token_type_ids), `mask_scaling` comes first.
    - relative: the `RelativeTable`, `SinusoidalDistances` or `TransientGlobals` of the layers'
      `DisentangledAttention`, `TransformerXLAttention` or `TransientGlobalAttention`.
    - causal: True masks later keys, as in a decoder. final_norm: a norm after the layers.
    - pooler: adds the output tanh(W x₀ + b) of the first token. sentence: adds a sequence embedding. head: adds scores.
    """

    vocab: int
    dim: int
    layers: int | Sequence[Layer]
    block: Layer | None = None
    positions: Positions | None = None
    token_types: int = 0
    embed_norm: Norm | None = None
    final_norm: Norm | None = None
    pooler: bool = False
    context: int | None = None
    embed_scale: float = 1.0
    position_bias: T5Bias | None = None
    embed_dim: int | None = None
    relative: RelativeTable | SinusoidalDistances | TransientGlobals | None = None
    sentence: SentencePooling | None = None
    mask_scaling: MaskScaling | None = None
    causal: bool | None = None
    head: TaskHead | None = None

    def __post_init__(self) -> None:
        _check_settings(self)

    def __call__(
        self, input_ids: Value, attention_mask: Value, token_type_ids: Value | None = None
    ) -> dict[str, Value]:
        """Map inputs [batch, seq] to outputs by name (see `graph`); attention_mask is 0 for masked tokens."""
        facts = {"key_mask": attention_mask} | ({} if self.causal else {"bidirectional": attention_mask})
        with provide_positions(input_ids), providing(**facts):
            table = _find_embedding_table(self)
            x = _embed(self, input_ids, table, token_type_ids if self.token_types else None)
            if self.embed_dim is not None:
                x = linear(x, self.dim, "embed_proj", bias=True)
            relative = {} if self.relative is None else self.relative(x)
            if self._has_segments and token_type_ids is not None:
                segments = (ops.unsqueeze(token_type_ids, axes=axes) for axes in ((1, 3), (1, 2)))
                relative["same_segment"] = ops.equal(*segments, name="same_segment")
            with providing(**relative):
                x = _run_layers(self, x)
            if self.final_norm is not None:
                x = self.final_norm(x)
        outputs = {"last_hidden_state": x}
        if self.pooler:
            first = ops.squeeze(ops.slice(x, axis=1, start=0, stop=1), axes=(1,), name="first_token")
            outputs["pooler_output"] = ops.tanh(linear(first, self.dim, "pooler", bias=True), name="pooled")
        if self.sentence is not None:
            outputs["sentence_embedding"] = self.sentence(x, attention_mask, input_ids)
        if self.head is not None:
            outputs |= self.head(x, input_ids, attention_mask, outputs.get("pooler_output"), table)
        return outputs

    def graph(self, seed: int = 0, name: str = "encoder") -> Graph:
        """Return the IR graph, with parameters initialized by `seed` and i64[batch, seq] inputs input_ids,
        attention_mask, and token_type_ids with `token_types` or segments in `relative`.

        Outputs: last_hidden_state [batch, seq, dim], pooler_output [batch, dim] with a `pooler`, sentence_embedding
        [batch, width] with `sentence`, and the outputs of the head.

        Raises:
            WeftError: if settings do not fit; the message names the module and the setting.
        """
        inputs = [
            "input_ids",
            "attention_mask",
            *(["token_type_ids"] if self.token_types or self._has_segments else []),
        ]
        graph = trace_as(self, dict.fromkeys(inputs, IDS), seed, name, "last_hidden_state")
        describe_model(self, graph, "encoder")
        graph.meta.update({} if self.sentence is None else self.sentence.facts)
        return graph

    @property
    def _has_segments(self) -> bool:
        return isinstance(self.relative, SinusoidalDistances) and self.relative.segments
