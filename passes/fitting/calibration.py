"""Calibration: the activations of a graph on calibration sequences, for passes that fit weights to them.

The sequences come from a file of token ids, or of plain text if the graph has a tokenizer. `Activations` computes
values of a graph on request: a pass that fits layer after layer requests the inputs of one layer, changes the graph
after them, and continues.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, WeftError, ops
from weft.ir.interpreter import bind_sizes, run_node
from weft.ir.recipes.readers import Array
from weft.ir.storage.documents import check_regular, expand_home, open_regular, read_json

from ..core.trace import Trace

MIXTURE = Path(__file__).parent / "mixture.txt"  # prose, dialogue, code, tables and languages, written for weft
WINDOW = 128  # tokens per sequence of plain text
BATCH_TOKENS = 512  # tokens per batch
RANDOM_LENGTH = 64  # tokens per random sequence, without a tokenizer
SPAN = 16  # tokens read from a file per token used; sequences are sampled from them at even distances
MAX_ELEMENTS = 1 << 26  # elements of weights in memory at once, unless one node needs more
ID_FILES = (".npy", ".json")  # suffixes of files of token ids
CHARACTERS = 32  # characters of plain text read per token: more than any text has


def read_tokens(graph: Graph, path: str, limit: int) -> list[Array]:
    """Return the sequences in the file `path` as batches of token ids [batch, length], at most `limit` tokens in total.

    A .npy file holds an array of ids, a .json file lists of ids. Any other file is plain text: it is split into windows
    of 128 tokens (a shorter rest is dropped), or for encoders into lines. Each batch has sequences of one length.
    Sequences longer than the model's positions are truncated.

    Raises:
        WeftError: if the file cannot be read, is empty, has ids outside the vocabulary, or needs a missing tokenizer.
    """
    rows = _read_rows(graph, expand_home(path), CHARACTERS * (limit + 1))
    vocab = find_vocabulary_size(graph)
    longest = graph.meta.get("max_positions")
    sequences = list[Sequence[int] | Array]()
    for row in rows:
        if limit <= 0:
            break
        row = row[: min(limit, longest or limit)]
        limit -= len(row)
        if invalid := [i for i in row if not 0 <= i < vocab]:
            valid = f"the tokens of the model are 0 to {vocab - 1}"
            raise WeftError(f"the text {path} has token {invalid[0]}, but {valid}")
        sequences += [row] if len(row) else []
    if not sequences:
        raise WeftError(f"the text {path} has no tokens")
    return _make_batches(sequences)


def _make_batches(rows: Iterable[Sequence[int] | Array]) -> list[Array]:
    """Return `rows` (ids [length]) in batches of about `BATCH_TOKENS` tokens: all of one length, then of the next."""
    by_length: dict[int, list[Sequence[int] | Array]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    batches = []
    for length, same in by_length.items():
        size = max(1, BATCH_TOKENS // length)
        batches += [np.array(same[i : i + size], np.int64) for i in range(0, len(same), size)]
    return batches


def sample_tokens(
    graph: Graph, path: str | None, limit: int, least: int, name: str, subject: str, trace: Trace
) -> list[Array]:
    """Return batches of ids [batch, length] as `read_tokens` does: about `limit` tokens, evenly spaced in the file.

    `path` None is the text that comes with weft; if the graph has no tokenizer for it, return one batch of random
    tokens and warn in `trace`. Messages contain `name`, the pass, and `subject`, a plural noun for what it fits.

    Raises:
        WeftError: as `read_tokens` does, or if the file has fewer than min(least, limit) tokens.
    """
    if path is None and graph.tokenize is None:
        trace.note(
            f"{name}: warning: {subject} are fitted to random tokens: the model has no tokenizer to read a text with; "
            "give calibration= a .npy or .json file of token ids"
        )
        length = min(RANDOM_LENGTH, graph.meta.get("max_positions") or RANDOM_LENGTH, *_find_position_limits(graph))
        shape = max(1, BATCH_TOKENS // length), length
        return [np.random.default_rng(0).integers(0, find_vocabulary_size(graph), shape)]
    texts = read_tokens(graph, path or str(MIXTURE), SPAN * limit)
    if (count := sum(ids.size for ids in texts)) < min(least, limit):
        raise WeftError(
            f"{name}: the calibration text {path} has {count} tokens, but {subject} need {least} or more: give a "
            "longer text or leave out calibration="
        )
    return subsample_rows(texts, limit)


def subsample_rows(texts: Sequence[Array], limit: int) -> list[Array]:
    """Return every n-th sequence of the batches `texts` (ids [batch, length]), in new batches by ascending length.

    n = max(1, tokens // limit): about `limit` to 2 · `limit` tokens remain, or all if there are fewer.
    """
    every = max(1, sum(ids.size for ids in texts) // limit)
    return _make_batches(sorted([row for ids in texts for row in ids][::every], key=len))


def _find_position_limits(graph: Graph) -> list[int]:
    """Return the number of rows of each embedding table that the graph input position_ids indexes."""
    at = graph.inputs.get("position_ids")
    tables = [node.inputs[1] for node in (() if at is None else at.users) if node.op is ops.embedding]
    return [table.shape[0] for table in tables if table is not None and isinstance(table.shape[0], int)]


def _read_rows(graph: Graph, path: Path, characters: int) -> Sequence[Sequence[int] | Array]:
    """Return the sequences of token ids in the file `path`; at most `characters` of plain text are read."""
    if path.suffix in ID_FILES:
        return read_ids(path)
    check_regular(path)
    try:
        with open(open_regular(path), encoding="utf-8") as lines:
            text = lines.read(characters)
    except (OSError, ValueError) as e:
        raise _make_read_error(path, e) from e
    if graph.tokenize is None:
        raise WeftError(f"{path} is text, but the model has no tokenizer: give token ids as a .npy or .json file")
    if graph.meta.get("kind") == "encoder":
        return list(graph.tokenize([line for line in text.splitlines() if line.strip()]))
    (ids,) = graph.tokenize([text])
    return [ids[i : i + WINDOW] for i in range(0, max(1, len(ids) - WINDOW + 1), WINDOW)]


def read_ids(path: Path) -> Sequence[Sequence[int] | Array]:
    """Return the sequences of token ids in `path`: a .npy file of an array, or a .json file of lists.

    Raises:
        WeftError: if the file cannot be read, or holds something else.
    """
    check_regular(path)
    try:
        if path.suffix == ".npy":
            array = np.lib.format.open_memmap(path, "r")  # checks that the file is as large as its shape
            if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
                raise WeftError(f"{path} holds {array.dtype}{list(array.shape)}, not token ids [batch, length]")
            return list(np.atleast_2d(array))
        content = read_json(path, list)
    except (OSError, ValueError, SyntaxError, TokenError) as e:  # the header of .npy is read as Python
        raise _make_read_error(path, e) from e
    rows: list[Sequence[int]] = content if content and isinstance(content[0], list) else [content]
    if not all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows):
        raise WeftError(f"{path} does not hold lists of token ids")
    return rows


def _make_read_error(path: Path, error: Exception) -> WeftError:
    why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
    return WeftError(f"the text {path} cannot be read: {why}")


def find_vocabulary_size(graph: Graph) -> int:
    """Return the vocabulary size: the number of rows of the smallest table that token ids index; 2³¹ without one."""
    tables = []
    for name in ("input_ids", "encoder_input_ids"):
        if name in graph.inputs:
            readers = (n for n in graph.inputs[name].users if n.op is ops.embedding)
            tables += [n.inputs[1].shape[0] for n in readers if n.inputs[1] is not None]
    return min((t for t in tables if isinstance(t, int)), default=2**31)


def make_inputs(graph: Graph, ids: Array) -> dict[str, Array]:
    """Return values for all inputs of `graph`, by name: unpadded sequences `ids` [batch, length] from position 0.

    Raises:
        WeftError: if the graph has an input other than ids, masks, positions, token types and router noise.
    """
    values = {
        "input_ids": ids,
        "encoder_input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "encoder_attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
        "token_type_ids": np.zeros_like(ids),
    }
    inputs = {}
    for name, value in graph.inputs.items():
        if name.startswith("router_noise."):
            shape = value.type.concrete({"batch": ids.shape[0], "seq": ids.shape[1]})
            inputs[name] = np.zeros(shape, np.float32)
        elif name in values:
            inputs[name] = values[name]
        else:
            raise WeftError(f"calibration: the graph input {name} is not known from token ids: leave out calibration=")
    return inputs


class Activations:
    """Values of `graph` on the batches `texts` (ids [batch, length]), each as a list of one array per batch.

    Values are computed on request and discarded after their last reader. Nodes that read a requested value may be
    edited before the next request. Memory is needed for the requested values, for values that are read later, and for
    `MAX_ELEMENTS` elements of weights. Weights are cast to `dtype` unless it is None. Activations are float32, or
    float64 if an operand is.
    """

    def __init__(self, graph: Graph, texts: Sequence[Array], dtype: type[np.floating[Any]] | None = None) -> None:
        self.graph = graph
        self._dtype = dtype
        inputs_of_batches = [make_inputs(graph, ids) for ids in texts]
        self._bindings: list[dict[str, int]] = [{} for _ in inputs_of_batches]
        for inputs, binding in zip(inputs_of_batches, self._bindings, strict=True):
            for name, value in graph.inputs.items():
                bind_sizes(value.type, inputs[name].shape, binding, name)
        self._known = {value: [inputs[name] for inputs in inputs_of_batches] for name, value in graph.inputs.items()}
        values = [*graph.inputs.values(), *(v for node in graph.nodes for v in node.outputs)]
        self._by_name = {v.name: v for v in values}
        self._done: set[Node] = set()
        self._replaced: Mapping[Value, Array] = {}

    @contextlib.contextmanager
    def override(self, values: Mapping[Value, list[Array]] = {}, weights: Mapping[Value, Array] = {}) -> Iterator[None]:
        """Return a context in which `values` replace computed values, and `weights` the elements of parameters.

        The end of the context discards the activations computed inside it, so that nodes may be edited afterwards.
        """
        saved, self._replaced = (dict(self._known), set(self._done)), weights
        self._known.update(values)
        try:
            yield
        finally:
            (self._known, self._done), self._replaced = saved, {}

    def __call__(self, value: Value) -> list[Array]:
        """Return `value`, one array per batch, after computing it unless it is stored.
        A value of another graph (a clone) represents the value of the same name."""
        value = value if value.graph is self.graph else self._by_name[value.name]
        missing = self._missing_nodes(value)
        self._done.difference_update(missing)  # dropped values are computed again
        for nodes in _group_nodes(missing):
            if _is_lookup(nodes[0]):
                ids, table = nodes[0].inputs
                assert ids is not None and isinstance(table, Param)
                self._known[nodes[0].output] = self._look_up(self._known[ids], table.recipe)
            else:
                self._run(nodes, value)
            self._done.update(nodes)
            for v in {v for node in nodes for v in _list_operands(node)}:
                # Graph inputs stay: no node can compute them again.
                if v.producer is not None and self._done.issuperset(v.users):
                    self._known.pop(v, None)
        return self._known[value]

    def _missing_nodes(self, value: Value) -> list[Node]:
        """Return the nodes that compute `value` from stored values, producers before readers."""
        # A stack, not recursion: a chain of nodes can be longer than Python's recursion limit.
        nodes: dict[Node, None] = {}
        stack = [value]
        while stack:
            node = stack[-1].producer
            if stack[-1] in self._known or node in nodes:
                stack.pop()
                continue
            assert node is not None
            missing = [v for v in _list_operands(node) if v not in self._known and v.producer not in nodes]
            stack += missing
            if not missing:
                nodes[node] = None
        return list(nodes)

    def _run(self, nodes: Sequence[Node], value: Value) -> None:
        """Run `nodes` on one batch after another; store `value` and the outputs that nodes not yet run read."""
        outputs = [v for node in nodes for v in node.outputs]
        weights = {
            v: self._replaced[v] if v in self._replaced else self._cast(v.recipe.evaluate(self.graph.reader))
            for node in nodes
            for v in node.inputs
            if isinstance(v, Param)
        }
        done = self._done.union(nodes)
        stored = [v for v in outputs if v is value or not done.issuperset(v.users)]
        last = {v: node for node in nodes for v in _list_operands(node)}
        results: dict[Value, list[Array]] = {v: [] for v in stored}
        for i, binding in enumerate(self._bindings):
            here: dict[Value, Array] = {}
            for node in nodes:
                operands = [
                    None if v is None else weights[v] if v in weights else here[v] if v in here else self._known[v][i]
                    for v in node.inputs
                ]
                # References compute in float64; results are rounded to float32 unless an operand is float64 itself.
                wide = any(array is not None and array.dtype == np.float64 for array in operands)
                for out, array in zip(node.outputs, run_node(node.op, operands, node.attrs, binding), strict=True):
                    here[out] = array if wide or array.dtype != np.float64 else array.astype(np.float32)
                for v in _list_operands(node):
                    if last[v] is node and v not in results:
                        here.pop(v, None)
            for v, arrays in results.items():
                arrays.append(here[v])
        self._known.update(results)

    def _cast(self, weight: Array) -> Array:
        return weight if self._dtype is None or weight.dtype.kind != "f" else weight.astype(self._dtype, copy=False)

    def _look_up(self, ids: Sequence[Array], table: Recipe) -> list[Array]:
        """Return, for each array of `ids`, the rows of `table` [vocab, width]; the table is read block by block."""
        width = table.shape(self.graph.reader)[1]
        rows = [np.empty(0)] * len(ids)
        start = 0
        for block in map(self._cast, table.blocks(self.graph.reader)):
            for i, wanted in enumerate(ids):
                # The dtype is known with the first block.
                if not start:
                    rows[i] = np.empty((*wanted.shape, width), block.dtype)
                here = (wanted >= start) & (wanted < start + len(block))
                rows[i][here] = block[wanted[here] - start]
            start += len(block)
        return rows


def _list_operands(node: Node) -> list[Value]:
    """Return the inputs of `node` that are not parameters."""
    return [v for v in node.inputs if v is not None and not isinstance(v, Param)]


def _is_lookup(node: Node) -> bool:
    return node.op is ops.embedding and isinstance(node.inputs[1], Param)


def _group_nodes(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    """Yield `nodes` in groups with at most `MAX_ELEMENTS` weight elements; a larger node, or a lookup, is alone."""
    batch: list[Node] = []
    total = 0
    for node in nodes:
        size = sum(math.prod(v.shape) for v in node.inputs if isinstance(v, Param))
        if batch and (total + size > MAX_ELEMENTS or _is_lookup(node) or _is_lookup(batch[0])):
            yield batch
            batch, total = [], 0
        batch.append(node)
        total += size
    if batch:
        yield batch
