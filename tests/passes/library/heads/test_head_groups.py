"""Merged and repeated key and value heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.ir import Graph, WeftError, interpret, ops, parse
from weft.ir.recipes import MeanPool, Source
from weft.passes import Trace, lookup, run_passes
from weft.passes.core.equivalence import EXACT, measure_difference
from weft.passes.edits.edit import rebuild_node
from weft.passes.fitting.calibration import read_tokens

from ...fitting.head_graphs import HEADS, METHODS, MODELS, RNG, WIDTH, D, attention_graph, attentions, drawn
from ...models import Tiny, applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from .head_graphs import GRAPHS, check_exact_and_idempotent, check_refused, rows_taken


def with_one(weights: dict[str, np.ndarray], role: str) -> np.ndarray:
    """Maps of the heads of q, k or v, [heads, D, WIDTH + 1], with biases last."""
    w = weights[f"{role}.weight"]
    return np.concatenate([w, weights.get(f"{role}.bias", np.zeros(len(w)))[:, None]], 1).reshape(-1, D, WIDTH + 1)


def in_bases(weights: dict[str, np.ndarray], copies: int, pairs: int, interleaved: bool) -> dict[str, np.ndarray]:
    """Every KV head of `weights` `copies` times, each copy in a basis of its own, which q and o follow."""
    rng, biased = RNG(1), "k.bias" in weights
    q, k, v = (with_one(weights, r) for r in "qkv")
    o = weights["o.weight"].reshape(WIDTH, HEADS, D).swapaxes(0, 1)
    groups = len(k)
    run = HEADS // (groups * copies)
    keys, values, queries, outputs = [], [], q.copy(), o.copy()
    for head in range(groups * copies):
        change = np.eye(D)
        change[2 * pairs :, 2 * pairs :] += 0.4 * rng.standard_normal((D - 2 * pairs,) * 2)
        for p in range(pairs):  # a complex factor for each pair
            i, j = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
            re, im = rng.standard_normal(2)
            change[np.ix_([i, j], [i, j])] = [[re, -im], [im, re]]
        any_basis = np.eye(D) + 0.4 * rng.standard_normal((D, D))
        keys.append(change @ k[head // copies])
        values.append(any_basis @ v[head // copies])
        for h in range(head * run, (head + 1) * run):
            queries[h] = np.linalg.inv(change).T @ q[h]
            outputs[h] = o[h] @ np.linalg.inv(any_basis)
    maps = {"q": queries, "k": np.array(keys), "v": np.array(values)}
    found = {"table": weights["table"], "o.weight": outputs.swapaxes(0, 1).reshape(WIDTH, -1)}
    found |= {f"{r}.weight": m[..., :-1].reshape(-1, WIDTH) for r, m in maps.items()}
    return found | ({f"{r}.bias": m[..., -1].reshape(-1) for r, m in maps.items()} if biased else {})


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    ids = RNG(3).integers(0, 37, (2, 7))
    return {n: ids if n == "input_ids" else np.broadcast_to(np.arange(7), (2, 7)) for n in graph.inputs}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("calibrated", [False, True], ids=["weights", "text"])
@pytest.mark.parametrize("biases", ["", "qkv"], ids=["no biases", "biases"])
@pytest.mark.parametrize(("pairs", "interleaved"), [(0, False), (4, False), (4, True), (3, False), (2, True)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_svd_merges_heads_that_differ_by_a_basis_without_loss(
    text: str, groups: int, pairs: int, interleaved: bool, biases: str, calibrated: bool
) -> None:
    weights = drawn(groups, biases)
    shared = attention_graph(weights, groups, pairs, interleaved)
    many = attention_graph(in_bases(weights, 3, pairs, interleaved), 3 * groups, pairs, interleaved)
    want = interpret(shared, feeds(shared))["y"]
    assert measure_difference(want, interpret(many, feeds(many))["y"]) <= EXACT
    calibration = f", calibration={json.dumps(text)}" if calibrated else ""
    merged = run_passes(many, f"mha-to-gqa{{kv_heads={groups}, method=svd{calibration}}}", verify=True)
    assert [n.attrs["kv_heads"] for n in attentions(merged)] == [groups]
    assert measure_difference(want, interpret(merged, feeds(merged))["y"]) <= EXACT
    averaged = run_passes(many, f"mha-to-gqa{{kv_heads={groups}}}")
    assert measure_difference(want, interpret(averaged, feeds(averaged))["y"]) > 0.05


@pytest.mark.parametrize("packing", ["dce", "pack-qkv, fuse-residual-norm"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equal_heads_become_one_without_loss(model: Tiny, method: str, packing: str) -> None:
    """As its check says, which runs here; and the graph keeps its form."""
    graph = applied(packing, model.graph())
    trace = Trace()
    merged = applied(f"mha-to-gqa{{kv_heads=2, method={method}}}", graph, trace)
    run_passes(graph, f"mha-to-gqa{{kv_heads=2, method={method}}}", verify=True)
    assert trace.rewrites["mha-to-gqa"] == 2
    for node in attentions(merged):
        assert node.attrs["kv_heads"] == 2
        assert node.operand("k").width == node.operand("v").width == 2 * model.head_dim
    assert count(merged, "rope") == count(graph, "rope")
    assert applied(f"mha-to-gqa{{kv_heads=2, method={method}}}", merged) == merged


def test_means_and_first_heads_of_contiguous_runs() -> None:
    weights = drawn(6, "qkv")
    for method, pick in (("mean", lambda w: w.mean(1)), ("first", lambda w: w[:, 0])):
        merged = applied(f"mha-to-gqa{{kv_heads=2, method={method}}}", attention_graph(weights, 6, 4))
        own = {
            name: pick(w.reshape(2, 3, D, *w.shape[1:])).reshape(2 * D, *w.shape[1:]) if name[0] in "kv" else w
            for name, w in weights.items()
        }
        wanted = attention_graph(own, 2, 4)
        assert measure_difference(*(interpret(g, feeds(g))["y"] for g in (wanted, merged))) <= EXACT
        assert {type(merged.params[n].recipe) for n in ("q.weight", "o.weight")} == {Source}


def test_progress_is_reported() -> None:
    told = list[tuple[str, int, int]]()
    run_passes(Tiny().graph(), "dce, mha-to-gqa{kv_heads=1}", progress=lambda *step: told.append(step))
    assert told == [("mha-to-gqa", 0, 2), ("mha-to-gqa", 1, 2)]


def test_falls_back_to_means_where_the_basis_is_fixed() -> None:
    trace = Trace()
    graph = MODELS["norms of heads"].graph()
    merged = applied("mha-to-gqa{kv_heads=2, method=svd}", graph, trace)
    assert isinstance(merged.params["layers.0.attn.k.weight"].recipe, MeanPool)
    assert isinstance(merged.params["layers.0.attn.v.weight"].recipe, Source)
    assert merged.params["layers.0.attn.q.weight"].recipe == graph.params["layers.0.attn.q.weight"].recipe
    first, _ = (line for line in trace.lines if "warning" in line)
    assert first.startswith("mha-to-gqa: warning: %layers.0.attn.attention gets means instead of fitted keys: rms_norm")


def test_long_texts_are_read_in_windows(tmp_path: Path) -> None:
    graph = Tiny(layers=1).graph()
    graph.tokenize = lambda texts: [[ord(c) % 37 for c in one] for one in texts]
    plain = tmp_path / "plain.txt"
    plain.write_text("line one\n\n" + "x" * 300)
    assert [a.shape for a in read_tokens(graph, str(plain), 1000)] == [(2, 128)]
    assert [a.shape for a in read_tokens(graph, str(plain), 200)] == [(1, 128), (1, 72)]
    graph.meta["kind"] = "encoder"
    assert [a.shape for a in read_tokens(graph, str(plain), 1000)] == [(1, 8), (1, 300)]
    array = tmp_path / "ids.npy"
    np.save(array, np.arange(30, dtype=np.int32).reshape(5, 6))
    (found,) = read_tokens(graph, str(array), 18)
    assert found.tolist() == np.arange(18).reshape(3, 6).tolist()
    np.save(array, np.arange(600 * 3).reshape(600, 3) % 37)
    assert [len(a) for a in read_tokens(graph, str(array), 1200)] == [170, 170, 60]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.npy", None, "cannot be read: no such file"),
        ("text.txt", b"some words", "but the model has no tokenizer: give token ids as a .npy or .json file"),
        ("ids.json", b"[[1, 2], [99]]", "has token 99, but the tokens of the model are 0 to 36"),
        ("ids.json", b'{"ids": [1]}', "a JSON array was expected, not object"),
        ("ids.json", b"[[]]", "has no tokens"),
        ("ids.json", b"[1, ", "not valid JSON"),
        ("ids.npy", b"nothing", "cannot be read"),
        ("ids.npy", b"", "cannot be read"),
        ("ids.json", b"[99999999999999999999]", "has token 99999999999999999999, but the tokens of"),
        ("ids.json", b"[" * 100_000, "nested more than 100 deep"),
    ],
)
def test_unreadable_calibration_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WeftError, match=message):
        applied(f"mha-to-gqa{{kv_heads=1, method=svd, calibration={json.dumps(str(tmp_path / name))}}}", Tiny().graph())


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("mha-to-gqa{kv_heads=4}", Tiny(kv_heads=6), "kv_heads=4 does not divide the 6 key and value heads"),
        ("mha-to-gqa{kv_heads=0}", Tiny(), "must both be positive"),
        ("mha-to-gqa{kv_heads=6}", Tiny(kv_heads=2), "kv_heads=6 does not divide the 2"),
        ("kv-cache, mha-to-gqa{kv_heads=1}", Tiny(), "run mha-to-gqa before kv-cache"),
        ('mha-to-gqa{kv_heads=1, calibration="a.npy"}', Tiny(), "calibration= is for method=svd, not for method=mean"),
    ],
)
def test_invalid_arguments_are_refused(text: str, model: Tiny, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        applied(text, model.graph())


def test_keys_that_are_values_are_refused() -> None:
    graph = parse("""graph latent {
      input %q: f32[batch, seq, 8]
      input %c: f32[batch, seq, 8]
      %y: f32[batch, seq, 6] = attention(%q, %c, heads=2, kv_heads=2, value_dim=3)
      output y = %y
    }""")
    trace = Trace()
    assert applied("mha-to-gqa{kv_heads=1}", graph, trace) == graph
    assert [r.reason for r in trace.refusals] == ["its keys are its values too"]


@pytest.mark.parametrize("name", GRAPHS)
def test_repeat_keeps_outputs(name: str) -> None:
    after = check_exact_and_idempotent(ZOO[name](), "gqa-to-mha")
    assert all(a.attrs["heads"] == a.attrs["kv_heads"] for a in attentions(after))


def test_one_key_head_becomes_some_then_all() -> None:
    graph = Tiny(kv_heads=1).graph()
    two = applied("gqa-to-mha{kv_heads=2}", graph)
    assert [a.attrs["kv_heads"] for a in attentions(two)] == [2, 2]
    assert two.params["layers.0.attn.k.weight"].shape == (8, 18)
    six = applied("gqa-to-mha", two)
    assert worst(graph, two) == 0 and worst(graph, six) == 0
    assert str(applied("gqa-to-mha", graph)) != str(six) and worst(applied("gqa-to-mha", graph), six) == 0


@pytest.mark.parametrize(
    ("pipeline", "name", "reason"),
    [
        ("gqa-to-mha{kv_heads=3}", "variant/grouped", "3 is not a multiple of its 2 KV heads"),
        ("gqa-to-mha{kv_heads=4}", "variant/grouped", "4 KV heads do not divide its 6 query heads"),
        ("gqa-to-mha", "variant/latent", "its keys are its values too"),
        ("gqa-to-mha", "cached/family mistral-gqa", "run gqa-to-mha before kv-cache"),
    ],
)
def test_repeat_refuses(pipeline: str, name: str, reason: str) -> None:
    check_refused(pipeline, name, reason)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("gqa-to-mha{kv_heads=0}", "kv_heads=0 must be positive"),
    ],
)
def test_repeat_rejects_arguments(pipeline: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(pipeline, Tiny().graph())


def test_copies_of_a_head_are_adjacent() -> None:
    graph = Tiny(layers=1, rope=False).graph()
    for repeated, error in (((0, 0, 0, 1, 1, 1), 0.0), ((0, 1, 0, 1, 0, 1), 0.05)):
        by_hand = graph.clone()
        for part in "kv":
            (linear,) = (n for n in by_hand.nodes if n.output.name == f"layers.0.attn.{part}")
            rows_taken(by_hand, f"layers.0.attn.{part}.weight", repeated)
            rebuild_node(linear)
        (node,) = (n for n in by_hand.nodes if n.op is ops.attention)
        rebuild_node(node, kv_heads=6)
        found = worst(graph, by_hand)
        assert found > error if error else found == 0


def test_repeat_documents_its_tradeoff() -> None:
    assert lookup("gqa-to-mha").tradeoff


@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize("name", ["variant/grouped", "variant/norms of q and k", "packed/family phi3"])
def test_repeated_heads_merge_without_loss(name: str, method: str) -> None:
    """GQA to MHA, whose heads are then identical in each group; back to GQA; and to MHA once more: one function."""
    graphs = [ZOO[name]()]
    (kv_heads,) = {a.attrs["kv_heads"] for a in attentions(graphs[0])}
    for pipeline in ("gqa-to-mha", f"mha-to-gqa{{kv_heads={kv_heads}, method={method}}}", "gqa-to-mha"):
        graphs.append(applied(pipeline, graphs[-1]))
        assert worst(graphs[0], graphs[-1]) <= EXACT
    assert attentions(graphs[2])[0].attrs["kv_heads"] == kv_heads
    assert attentions(graphs[3])[0].attrs["kv_heads"] == attentions(graphs[3])[0].attrs["heads"]
