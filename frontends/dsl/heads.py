"""Task heads: modules that compute scores of labels, spans or tokens from hidden states."""

from __future__ import annotations

from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Value
from weft.ir.ops.activation import activate
from weft.ir.types import dtypes

from .build import module, named, provided
from .checks import need, need_choice, need_int, need_type
from .layers import Norm, linear

TASKS = (  # the names of pipelines of transformers, where there is one
    *("text-classification", "token-classification", "question-answering", "fill-mask", "multiple-choice"),
    *("next-sentence-prediction", "replaced-token-detection", "image-classification", "audio-classification", "ctc"),
)
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
POOLS = ("first", "last", "mean", "late", "pooler", "token", "first+mean")
FIXED = {"question-answering": 2, "multiple-choice": 1, "replaced-token-detection": 1}  # tasks without labels
BY_TOKEN = ("token-classification", "question-answering", "fill-mask", "replaced-token-detection", "ctc")


@module
class HeadTransform:
    """The transform norm(act(W x + b)) before an output head, as in BERT's language models.

    W is ``dense.weight`` [width, dim], b ``dense.bias`` (only with `bias`). `norm` or `activation` None omits a step.
    `width` is the output width, by default that of x.
    """

    norm: Norm | None = None
    activation: str | None = "gelu"
    bias: bool = False
    width: int | None = None

    def __call__(self, x: Value) -> Value:
        """Map x [..., dim] to [..., width]."""
        y = linear(x, self.width or x.width, "dense", self.bias)
        y = y if self.activation is None else activate(y, self.activation)
        return y if self.norm is None else named(self.norm, "norm")(y)


@module
class TaskHead:
    """A head that computes scores for a `task` (one of `TASKS`) from the last hidden states of a model.

    - labels: the label names, or their number; None means the fixed number of the task, or the vocabulary.
    - pool: the vector of a sequence that is scored: first (token), last (token), mean, pooler (the model's output),
      token (the last token with the id `token`), first+mean (the first token, concatenated with the mean of the tokens
      from index `skip` on), or late (each token is scored, and the scores are averaged); None scores each token.
    - transform: a module before the output linear ``out``.
    - bias: ``out`` has a bias. tied: the weight of ``out`` is the embedding table.
    - problem_type: one of `PROBLEMS`, as in configs of transformers.
    - output: the name of the scores in the outputs. also: a second head, called with the same arguments.
    - start: the token before the sequence, for a decoder that reads the same sequence as its encoder (BART).
    """

    task: str
    labels: int | tuple[str, ...] | None = None
    pool: str | None = None
    transform: HeadTransform | None = None
    bias: bool = True
    tied: bool = False
    token: int | None = None
    problem_type: str | None = None
    skip: int = 1
    start: int = 0
    output: str = "logits"
    also: Any = None

    def __post_init__(self) -> None:
        need_choice(self, "task", TASKS)
        for name, choices in (("pool", POOLS), ("problem_type", PROBLEMS)):
            if getattr(self, name) is not None:
                need_choice(self, name, choices)
        need_type(self, "also", TaskHead)
        if isinstance(self.labels, list):
            object.__setattr__(self, "labels", tuple(self.labels))
        if isinstance(self.labels, int):
            need_int(self, "labels")
        elif self.labels is not None:
            fits = isinstance(self.labels, tuple) and self.labels and all(isinstance(n, str) for n in self.labels)
            need(self, bool(fits), f"labels={self.labels!r} must be a positive number or a list of names")
        by_token = self.task in BY_TOKEN
        fault = f"scores tokens: leave out pool={self.pool!r}" if by_token else "needs pool=..."
        need(self, by_token == (self.pool is None), f"task {self.task} {fault}")
        need(self, (self.pool == "token") == (self.token is not None), "pool='token' and token=... need each other")
        need(self, self.labels is not None or self.task in (*FIXED, "fill-mask"), f"task {self.task} needs labels=...")

    @property
    def count(self) -> int | None:
        """Return the number of scores per sequence or token; None for the size of the vocabulary."""
        return FIXED.get(self.task) or (len(self.labels) if isinstance(self.labels, tuple) else self.labels)

    def __call__(
        self,
        x: Value,
        ids: Value | None = None,
        mask: Value | None = None,
        pooled: Value | None = None,
        table: Value | None = None,
    ) -> dict[str, Value]:
        """Map hidden states x [batch, seq, dim] to scores by name: `output` and the scores of `also`, or for
        question-answering only start_logits and end_logits. `ids` and `mask` are [batch, seq], `pooled` is the pooler's
        output [batch, dim], `table` the embedding [vocab, dim]; each is needed only by some pools and tasks."""
        y = x if self.pool in (None, "late") else self._pool(x, ids, mask, pooled)
        y = y if self.transform is None else self.transform(y)
        out: Any = self.count or (table if self.tied or table is None else table.shape[0])
        scores = linear(y, out, "out", self.bias)
        if self.pool == "late":
            scores = _pool_mean(scores, mask)
        if self.task == "question-answering":
            return {
                f"{name}_logits": ops.squeeze(ops.slice(scores, axis=2, start=i, stop=i + 1), axes=(2,), name=name)
                for i, name in enumerate(("start", "end"))
            }
        if self.task == "replaced-token-detection":
            scores = ops.squeeze(scores, axes=(2,), name="logits")
        further_scores = {} if self.also is None else named(self.also, "also")(x, ids, mask, pooled, table)
        return {self.output: scores, **further_scores}

    def _pool(self, x: Value, ids: Value | None, mask: Value | None, pooled: Value | None) -> Value:
        if self.pool == "pooler":
            if pooled is None:
                raise WeftError("pool='pooler' needs an encoder with a pooler: set pooler in it")
            return pooled
        first = ops.squeeze(ops.slice(x, axis=1, start=0, stop=1), axes=(1,), name="first_token")
        if self.pool == "first":
            return first
        if self.pool == "first+mean":
            return ops.concat(
                first, ops.mean(ops.slice(x, axis=1, start=self.skip, stop=x.shape[1]), axes=(1,)), axis=1
            )
        if self.pool == "mean":
            return _pool_mean(x, mask)
        marked, ids = mask, provided("text_ids") or ids  # a decoder with an encoder reads ids shifted by one token
        if self.token is not None and ids is not None:
            marked = ops.cast(ops.equal(ids, ops.affine(ids, by=0, plus=self.token)), to=dtypes.i64)
        if marked is None:
            raise WeftError(f"pool={self.pool!r} needs a model that reads token ids")
        # The largest index of a marked token: padding may be on either side.
        last_index = ops.max(ops.mul(marked, ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))), axes=(1,), keepdims=True)
        return ops.squeeze(ops.gather_rows(x, last_index), axes=(1,), name="last_token")

    def describe(self, graph: Graph) -> Graph:
        """Store in graph.meta the task, the problem type (if set), and the label names, LABEL_i if `labels` is a
        number; none for ctc, a task in `FIXED`, or `labels` None. Return `graph`."""
        names = self.labels if isinstance(self.labels, tuple) else tuple(f"LABEL_{i}" for i in range(self.count or 0))
        graph.meta["task"] = self.task
        if names and self.task not in (*FIXED, "ctc"):
            graph.meta["labels"] = list(names)
        if self.problem_type is not None:
            graph.meta["problem_type"] = self.problem_type
        return graph


def _pool_mean(x: Value, mask: Value | None) -> Value:
    """Return the mean [batch, width] of x [batch, seq, width] over tokens with nonzero `mask` (None: over all)."""
    if mask is None:
        return ops.mean(x, axes=(1,))
    weights = ops.cast(ops.cast(ops.unsqueeze(mask, axes=(2,)), to=dtypes.bool_), to=x.type.dtype)
    return ops.div(ops.sum(ops.mul(x, weights), axes=(1,)), ops.sum(weights, axes=(1,)), name="mean_token")
