"""Token mixers other than `Attention`: latent attention, relative vectors, linear attention, Fourier transforms."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.latent import emit_absorbed, emit_expanded
from weft.ir.ops.positions import gather_per_query

from .attention import LightningIndex
from .build import fill, keep, kept, module, named, param, provided, uniform
from .checks import need
from .layers import Norm, RMSNorm, divide_width, is_causal, linear
from .rotary import RoPE, Temperature


@module
class MLA:
    """Multi-head latent attention in a decoder (DeepSeek-V2, 2024).

    Keys and values of all `heads` are projected from one latent of `rank` features per token; in addition, all heads
    share a rotary key of `rope_dim` features. With `absorbed`, attention runs on the latent, and only latent and rotary
    key are cached; without, it runs on the keys and values of all heads. Both compute the same function.

    Parameters: ``q.weight`` [heads·(head_dim + rope_dim), dim], or with `q_rank` ``q_down.weight`` [q_rank, dim],
    ``q_norm.weight`` and ``q_up.weight``; the last rope_dim features of every head are rotated. ``kv_down.weight``
    [rank + rope_dim, dim], ``kv_norm.weight`` [rank], ``k_up.weight`` [heads·head_dim, rank], ``v_up.weight``
    [heads·v_head_dim, rank], ``o.weight`` [dim, heads·v_head_dim]. With `rope` None nothing is rotated (Kimi Linear).
    `scale` defaults to 1/√(head_dim + rope_dim). `temperature` is a factor of the queries, as in `Attention`.

    `index` selects the keys that a query attends to; it reads the latent of queries if `q_rank` is set, else x.
    `keep_index` stores the selection under a name; `share_index` uses the selection stored by an earlier layer (GLM-5).
    """

    heads: int
    rank: int
    head_dim: int
    rope_dim: int
    v_head_dim: int
    rope: RoPE | None
    q_rank: int | None = None
    norm: Norm = RMSNorm()
    scale: float | None = None
    absorbed: bool = True
    temperature: Temperature | None = None
    index: LightningIndex | None = None
    keep_index: str | None = None
    share_index: str | None = None

    def __post_init__(self) -> None:
        need(self, self.index is None or not self.share_index, "index and share_index exclude each other")
        need(self, self.index is not None or not self.keep_index, "keep_index needs index=...")
        if self.rope is not None:
            self.rope.recipe(self.rope_dim)

    def __call__(self, x: Value) -> Value:
        if not is_causal():
            raise WeftError("MLA is causal: it must be in a Decoder")
        source = x if self.q_rank is None else named(self.norm, "q_norm")(linear(x, self.q_rank, "q_down"))
        q, rotary = self._project_queries(source)
        down = linear(x, self.rank + self.rope_dim, "kv_down")
        latent, shared = ops.split.emit(down, sizes=(self.rank, self.rope_dim), name=("latent", "k_shared"))
        y = (emit_absorbed if self.absorbed else emit_expanded)(
            q,
            rotary if self.rope is None else self.rope(rotary, self.heads, "q_rope"),
            named(self.norm, "kv_norm")(latent),
            shared if self.rope is None else self.rope(shared, 1, "k_rope"),
            param("k_up.weight", (self.heads * self.head_dim, self.rank)),
            param("v_up.weight", (self.heads * self.v_head_dim, self.rank)),
            self._compute_index_bias(x, source),
            heads=self.heads,
            scale=self.scale,
        )
        return linear(y, x.width, "o")

    def _compute_index_bias(self, x: Value, source: Value) -> Value | None:
        """Return the bias [batch, 1, seq, seq] that masks keys, stored earlier or by `index`; None without either."""
        if self.share_index is not None:
            return kept(self.share_index)[0]
        bias = None if self.index is None else self.index(x, source)
        if self.keep_index is not None and bias is not None:
            keep(self.keep_index, bias)
        return bias

    def _project_queries(self, x: Value) -> tuple[Value, Value]:
        """Return the features of queries that are not rotated, [batch, seq, heads·head_dim], and the features that the
        caller rotates, [batch, seq, heads·rope_dim]."""
        width = self.head_dim + self.rope_dim
        q = linear(x, self.heads * width, "q" if self.q_rank is None else "q_up")
        q = q if self.temperature is None else self.temperature(q)
        by_head = ops.reshape(q, shape=(*q.shape[:2], self.heads, width), name="q_heads")
        parts = ops.split.emit(by_head, sizes=(self.head_dim, self.rope_dim), name=("q_plain", "q_turned"))
        plain, rotary = (ops.reshape(p, shape=(*q.shape[:2], self.heads * p.width)) for p in parts)
        return plain, rotary


@module
class RelativeAttention:
    """Attention with relative keys and values (Shaw 2018).

    The scores are q_i·(k_j + w_K[r])/√d, the output is Σ_j α_ij (v_j + w_V[r]), with r = clip(j − i, ±`clip`) + clip.
    Parameters: ``q``, ``k``, ``v`` and ``o.weight`` [dim, dim] (with biases if `bias`), w_K = ``keys`` and, with
    `values`, w_V = ``values`` [2·clip + 1, dim/heads], which all heads share. `causal` None follows the model.
    """

    heads: int
    clip: int
    values: bool = True
    causal: bool | None = None
    bias: bool = False

    def __call__(self, x: Value) -> Value:
        table = 2 * self.clip + 1, divide_width(x, self.heads, "heads")
        q, k, v = (linear(x, x.width, name, self.bias) for name in "qkv")
        keys, values = param("keys", table), param("values", table) if self.values else None
        past, mask = (None, None, None), provided("key_mask")
        causal = is_causal(self.causal)
        y = ops.relative_attention(q, k, v, keys, values, *past, mask, heads=self.heads, causal=causal)
        return linear(y, x.width, "o", self.bias)


@module
class LinearAttention:
    """Linear attention (Katharopoulos 2020): y_n = Σ_m φ(q_n)·φ(k_m) v_m / Σ_m φ(q_n)·φ(k_m), with φ = elu + 1.

    Its decode state has a constant size. `rope` rotates φ(q) and φ(k) in the numerator only (Su 2021). Parameters:
    ``q``, ``k``, ``v`` and ``o.weight`` [dim, dim], with biases if `bias`. `causal` None follows the model.
    """

    heads: int
    rope: RoPE | None = None
    causal: bool | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        if self.rope is not None:
            need(self, self.rope.amplitude == 1, f"amplitude={self.rope.amplitude} of rope must be 1")

    def __call__(self, x: Value) -> Value:
        d = divide_width(x, self.heads, "heads")
        q, k, v = (linear(x, x.width, name, self.bias) for name in "qkv")
        rotary = (None, None) if self.rope is None else self.rope.angles(x, d)
        y = ops.linear_attention(
            *(q, k, v, provided("key_mask"), *rotary),
            heads=self.heads,
            causal=is_causal(self.causal),
            interleaved=self.rope is not None and self.rope.interleaved,
        )
        return linear(y, x.width, "o", self.bias)


@module
class FourierMixing:
    """The real part of the Fourier transform of x along tokens and along features (Lee-Thorp 2021, FNet).

    It has no parameters, and treats padding like all other tokens.
    """

    def __call__(self, x: Value) -> Value:
        if is_causal():
            raise WeftError("the Fourier transform mixes all tokens: it belongs in an Encoder")
        return ops.fourier(x, name="fourier")


@module
class DisentangledAttention:
    """Attention with scores of content to content, content to position and position to content (He 2020, DeBERTa).

    score_ij = (q_i·k_j + q_i·K_r + k_j·Q_r) / √(d · terms), where r is the row for i − j in the encoder's
    `RelativeTable`, K and Q are projections of that table, and terms is the number of enabled terms, 1 to 3.
    `to_position` enables the term with K, `from_position` the term with Q. Parameters, [dim, dim] each: ``q``, ``k``,
    ``v``, ``o``, and for K and Q ``pos_k`` and ``pos_q``, or ``k`` and ``q`` again if `shared`. ``k`` and ``pos_k``
    have biases only with `key_bias`, all other projections always. Not causal.
    """

    heads: int
    to_position: bool = True
    from_position: bool = True
    shared: bool = False
    key_bias: bool = True

    def __call__(self, x: Value) -> Value:
        if is_causal():
            raise WeftError("disentangled attention is not causal: it belongs in an Encoder")
        d = divide_width(x, self.heads, "heads")
        q, v = linear(x, x.width, "q", True), linear(x, x.width, "v", True)
        k = linear(x, x.width, "k", self.key_bias)
        scale = (d * (1 + self.to_position + self.from_position)) ** -0.5
        y = ops.attention(
            *(q, k, v, self._compute_position_scores(q, k, scale), provided("key_mask")),
            heads=self.heads,
            kv_heads=self.heads,
            scale=scale,
        )
        return linear(y, x.width, "o", True)

    def _compute_position_scores(self, q: Value, k: Value, scale: float) -> Value | None:
        """Return the position terms of the scores, [batch, heads, seq, seq]; None if both terms are disabled."""
        if not (self.to_position or self.from_position):
            return None
        table, index = provided("relative_table"), provided("relative_rows")
        if table is None or index is None:
            raise WeftError("relative positions need a table: set relative=RelativeTable(...) in the Encoder")
        width, terms = q.width, []
        if self.to_position:
            scores = multiply_heads(q, linear(table, width, "k" if self.shared else "pos_k", self.key_bias), self.heads)
            terms.append(gather_per_query(scores, index))
        if self.from_position:
            scores = multiply_heads(k, linear(table, width, "q" if self.shared else "pos_q", True), self.heads)
            terms.append(
                ops.transpose(gather_per_query(scores, ops.transpose(index, axes=(0, 2, 1))), axes=(0, 1, 3, 2))
            )
        return ops.affine(ops.add(*terms) if len(terms) == 2 else terms[0], by=scale, name="position_scores")


@module
class TransformerXLAttention:
    """Attention with scores of contents, distances and segments (Dai 2019, Transformer-XL; Yang 2019, XLNet).

    score_ij = ((q_i + u)·k_j + (q_i + w)·r_{i−j} + (q_i + s)·e_{ij}) / √d. r are the vectors of the encoder's
    `SinusoidalDistances`, projected by ``r``; e_{ij} is row 0 of ``segments`` [2, dim] if i and j are in the same
    segment, else row 1; without segments in the encoder there is no e. ``q``, ``k``, ``v``, ``o`` and ``r`` are
    [dim, dim], without biases; u ``content_bias``, w ``distance_bias`` and s ``segment_bias`` [dim]. Not causal.
    """

    heads: int

    def __call__(self, x: Value) -> Value:
        table, index, same = (provided(name) for name in ("relative_table", "relative_rows", "same_segment"))
        if is_causal() or table is None or index is None:
            raise WeftError("TransformerXLAttention must be in an Encoder with relative=SinusoidalDistances(...)")
        d, width = divide_width(x, self.heads, "heads"), x.width
        q, k, v = (linear(x, width, name) for name in "qkv")
        distances = multiply_heads(_add_bias(q, "distance_bias"), linear(table, width, "r"), self.heads)
        scores = gather_per_query(distances, index)
        if same is not None:
            products = multiply_heads(_add_bias(q, "segment_bias"), param("segments", (2, width)), self.heads)
            equal, unequal = ops.split.emit(products, sizes=(1, 1), axis=3, name=("own_segment", "other_segment"))
            scores = ops.add(scores, ops.where(same, equal, unequal))
        scale = d**-0.5
        y = ops.attention(
            *(_add_bias(q, "content_bias"), k, v, ops.affine(scores, by=scale, name="position_scores")),
            provided("key_mask"),
            heads=self.heads,
            kv_heads=self.heads,
            scale=scale,
        )
        return linear(y, width, "o")


def _add_bias(q: Value, name: str) -> Value:
    return ops.add(q, param(name, (q.width,), fill(0.0)), name=f"with_{name}")


def multiply_heads(x: Value, vectors: Value, heads: int) -> Value:
    """Return the products [batch, heads, seq, n] of each head of x [batch, seq, width] and `vectors` [n, width]."""
    (batch, seq, _), rows, d = x.shape, vectors.shape[0], x.width // heads
    heads_first = ops.transpose(ops.reshape(x, shape=(batch, seq, heads, d)), axes=(0, 2, 1, 3))
    return ops.matmul(heads_first, ops.transpose(ops.reshape(vectors, shape=(rows, heads, d)), axes=(1, 2, 0)))


@module
class TransientGlobalAttention:
    """Attention to nearby tokens and to global tokens (Guo 2021, LongT5, arXiv 2112.07916).

    A global token is the sum of the tokens of a block, normalized by `norm`; every layer computes new global tokens.
    The encoder's `TransientGlobals` defines window and blocks. Parameters: ``q``, ``k``, ``v`` [heads·head_dim, dim],
    ``o`` [dim, heads·head_dim], no biases; ``global_norm``. `head_dim` defaults to dim/heads, `scale` to 1/√head_dim.
    """

    heads: int
    head_dim: int | None = None
    norm: Norm = RMSNorm()
    scale: float | None = None

    def __call__(self, x: Value) -> Value:
        facts = ("global_members", "run_queries", "run_keys", "run_mask", "run_bias")
        members, queries, keys, mask, bias = map(provided, facts)
        if members is None or queries is None or keys is None or mask is None or bias is None:
            raise WeftError("TransientGlobalAttention must be in an Encoder with relative=TransientGlobals(...)")
        batch, (runs, count), window = x.shape[0], keys.shape, bias.shape[2]
        width = self.heads * (self.head_dim or divide_width(x, self.heads, "heads"))
        sums = ops.matmul(members, x, name="global_sums")
        source = ops.concat(x, named(self.norm, "global_norm")(sums), axis=1, name="with_globals")
        q = ops.gather(linear(x, width, "q"), queries, axis=1)
        kv = [ops.gather(linear(source, width, name), keys, axis=1) for name in "kv"]
        y = ops.attention(
            ops.reshape(q, shape=(batch * runs, window, width)),
            *(ops.reshape(each, shape=(batch * runs, count, width)) for each in kv),
            *(bias, mask),
            heads=self.heads,
            kv_heads=self.heads,
            scale=self.scale,
        )
        y = ops.gather(ops.reshape(y, shape=(batch, runs * window, width)), ops.iota(x, axis=1), axis=1)
        return linear(y, x.width, "o")


@module
class SpanConvAttention:
    """Attention in parallel to a convolution whose kernel depends on the span around a token (Jiang 2020, ConvBERT).

    Attention and convolution have `heads` heads of dim / (2·heads) features each. The convolution is of a projection
    ``conv`` of x; its kernel of `conv` taps (odd) per token and head is softmax(W (q ⊙ s)), where s is a projection
    ``span`` of a depthwise convolution of x. Parameters: ``q``, ``k``, ``v``, ``span`` and ``conv`` [dim/2, dim],
    ``depthwise.weight`` [dim, conv], ``kernel`` (W) [heads·conv, dim/2], ``o`` [dim, dim]; biases except in depthwise.
    """

    heads: int
    conv: int = 9

    def __post_init__(self) -> None:
        need(self, self.conv % 2 == 1 and self.conv > 1, f"conv={self.conv} must be odd and above 1")

    def __call__(self, x: Value) -> Value:
        if is_causal():
            raise WeftError("SpanConvAttention reads later tokens: it must be in an Encoder")
        heads, d = self.heads, divide_width(x, 2 * self.heads, "2 · heads")
        q, k, v = (linear(x, heads * d, name, bias=True) for name in "qkv")
        kernel = linear(ops.mul(q, self._map_span(x, heads * d), name="around"), heads * self.conv, "kernel", bias=True)
        kernels = ops.softmax(ops.reshape(kernel, shape=(*x.shape[:2], heads, self.conv)), axis=3)
        near = self._gather_neighbours(linear(x, heads * d, "conv", bias=True), ops.iota(kernels, axis=3))
        taps = ops.reshape(near, shape=(*x.shape[:2], self.conv, heads, d))
        weights = ops.unsqueeze(ops.transpose(kernels, axes=(0, 1, 3, 2)), axes=(4,))
        mixed = ops.reshape(ops.sum(ops.mul(taps, weights), axes=(2,)), shape=q.shape, name="convolved")
        y = ops.attention(q, k, v, None, provided("key_mask"), heads=heads, kv_heads=heads)
        return linear(ops.concat(y, mixed, axis=2), x.width, "o", bias=True)

    def _map_span(self, x: Value, width: int) -> Value:
        """Return the projection ``span`` [batch, seq, width] of the depthwise convolution of x [batch, seq, dim]."""
        weight = param("depthwise.weight", (x.width, self.conv), uniform(self.conv**-0.5))
        near = self._gather_neighbours(x, ops.iota(weight, axis=1))
        y = ops.sum(ops.mul(near, ops.transpose(weight, axes=(1, 0))), axes=(2,), name="depthwise")
        return linear(y, width, "span", bias=True)

    def _gather_neighbours(self, x: Value, taps: Value) -> Value:
        """Return for each token of x the `conv` tokens centred on it, [batch, seq, conv, width], 0 past the ends.
        `taps` is 0, …, conv − 1."""
        zeros = _emit_zeros(x, self.conv // 2)
        padded, first = ops.concat(zeros, x, zeros, axis=1), ops.iota(x, axis=1)
        return ops.gather(padded, ops.add(ops.unsqueeze(first, axes=(1,)), ops.unsqueeze(taps, axes=(0,))), axis=1)


def _emit_zeros(x: Value, rows: int) -> Value:
    zero_row = ops.affine(ops.slice(x, axis=1, start=0, stop=1), by=0.0)
    return ops.expand(zero_row, shape=(x.shape[0], rows, x.shape[2]))
