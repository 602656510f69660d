"""mha-to-gqa: what it keeps exactly, what its means and truncated SVDs are, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, Node, Param, TensorType, WeftError, interpret, ops, parse
from weft.ir.recipes import MeanPool, Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.fitting.calibration import Activations, read_tokens
from weft.passes.fitting.head_conversion import Rotation, merge_keys, merge_values
from weft.passes.fitting.head_moments import compute_moments

from ...models import BATCH, SEQ, Tiny, applied, count
from ...rewrites import Rewrite, rewrites

RNG = np.random.default_rng
WIDTH, HEADS, D = 11, 6, 8
METHODS = ("mean", "first", "svd")


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is ops.attention]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Token ids of three texts, of two lengths."""
    path = tmp_path / "text.json"
    path.write_text(json.dumps([*RNG(0).integers(0, 37, (2, 9)).tolist(), [5, 3, 8, 1]]))
    return str(path)


def attention_graph(
    weights: dict[str, np.ndarray], kv_heads: int, pairs: int = 0, interleaved: bool = False, scale: float | None = None
) -> Graph:
    """Tokens embedded, an attention with these `weights` (float64) around, and a residual sum."""
    g = Graph("one", MemoryReader(weights))

    def param(name: str) -> Any:
        return g.add_param(name, TensorType(dtypes.f32, weights[name].shape), Source(name)) if name in weights else None

    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = ops.embedding(ids, param("table"))
    q, k, v = (ops.linear(x, param(f"{r}.weight"), param(f"{r}.bias"), name=r) for r in "qkv")
    if pairs:
        at = g.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
        frequencies = g.add_param("f", TensorType(dtypes.f32, (pairs,)), RopeFrequencies(2 * pairs, theta=50.0))
        q, k = (ops.rope(t, at, frequencies, heads=n, interleaved=interleaved) for t, n in ((q, HEADS), (k, kv_heads)))
    y = ops.attention(q, k, v, heads=HEADS, kv_heads=kv_heads, causal=True, scale=scale)
    g.add_output("y", ops.add(x, ops.linear(y, param("o.weight"), name="o")))
    return g


def drawn(kv_heads: int, biases: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = RNG(seed)
    rows = {"q": HEADS * D, "k": kv_heads * D, "v": kv_heads * D}
    found = {"table": rng.standard_normal((37, WIDTH)), "o.weight": rng.standard_normal((WIDTH, HEADS * D)) / 7}
    found |= {f"{r}.weight": rng.standard_normal((n, WIDTH)) / 3 for r, n in rows.items()}
    return found | {f"{r}.bias": rng.standard_normal(n) for r, n in rows.items() if r in biases}


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
def test_svd_finds_the_head_that_others_are_in_other_bases(
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


MODELS = {
    "rope": Tiny(kv_heads=6),
    "groups": Tiny(heads=8, kv_heads=4, bias="q k v"),
    "no rope": Tiny(kv_heads=6, rope=False, bias="v", norm="layer"),
    "norms of heads": Tiny(kv_heads=6, qk_norm=True),
    "biased scores, window": Tiny(kv_heads=6, rope=False, alibi=True, window=3),
}


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


def test_values_are_the_truncated_svd_of_whitened_outputs_and_values() -> None:
    """Against numpy's SVD of the stack O_h V_h L; any factorization of it is as good."""
    rng = RNG(5)
    v, o, x = rng.standard_normal((3, D, 12)), rng.standard_normal((6, 9, D)), rng.standard_normal((400, 12))
    x[:, 3] *= 20
    moment = x.T @ x / 400
    new_v, new_o = merge_values(v, o, 1, moment[None])
    values, vectors = np.linalg.eigh(moment)
    root = vectors * np.sqrt(values)
    stack = np.concatenate([o[h] @ v[h // 2] @ root for h in range(6)])
    left, strength, right = np.linalg.svd(stack, full_matrices=False)
    best = (left[:, :D] * strength[:D]) @ right[:D]
    found = np.concatenate([new_o[h] @ new_v[0] @ root for h in range(6)])
    lost = np.sqrt((strength[D:] ** 2).sum())
    assert np.linalg.norm(found - best) <= 1e-2 * lost  # up to the ridge
    assert lost <= np.linalg.norm(found - stack) <= 1.0001 * lost
    assert np.linalg.norm(stack - np.concatenate([o[h] @ v.mean(0) @ root for h in range(6)])) > 1.5 * lost


@pytest.mark.parametrize("pairs", [0, 2, 4])
def test_no_other_keys_make_smaller_errors(pairs: int) -> None:
    """E[(s − s')²] of scores of independent queries and keys, over all rotations, is a minimum: small changes of the
    weights only enlarge it."""
    rng = RNG(6)
    q, k, n = rng.standard_normal((4, D, 10)), rng.standard_normal((4, D, 9)), 50
    xq, xk = (
        rng.standard_normal((n, 10)) * np.linspace(0.3, 2, 10),
        rng.standard_normal((n, 9)) * np.linspace(2, 0.2, 9),
    )
    spread = np.array([1.0, 0.5, 2.0, 0.1])
    real, imaginary, rest = Rotation(pairs, False).parts(D)

    def loss(new_q: np.ndarray, new_k: np.ndarray) -> float:
        total = 0.0
        for h in range(4):
            a, b, c, d = q[h] @ xq.T, k[h] @ xk.T, new_q[h] @ xq.T, new_k[0] @ xk.T
            still = a[rest].T @ b[rest] - c[rest].T @ d[rest]
            error = (still**2).sum()
            for i, j in zip(real, imaginary, strict=True):  # over a turn, Re(z e^iθ)² is |z|²/2
                z = np.outer(a[i] + 1j * a[j], (b[i] + 1j * b[j]).conj())
                z -= np.outer(c[i] + 1j * c[j], (d[i] + 1j * d[j]).conj())
                error += (np.abs(z) ** 2).sum() / 2
            total += spread[h] * error
        return float(total)

    moments = xq.T @ xq / n, (xk.T @ xk / n)[None]
    found = merge_keys(q, k, 1, *moments, spread, Rotation(pairs, False))
    least = loss(*found)
    for scale in (1e-2, 1e-1):
        for _ in range(20):
            moved = [m + scale * rng.standard_normal(m.shape) * np.abs(m).mean() for m in found]
            assert loss(*moved) > least
    assert loss(q, k.mean(0, keepdims=True)) > 1.3 * least


def test_what_heads_see(text: str) -> None:
    """Moments against loops over heads, queries and keys."""
    weights = drawn(3, "qkv")
    graph = attention_graph(weights, 3, 4)
    (node,) = attentions(graph)
    texts = read_tokens(graph, text, 100)
    watched = attention_graph(weights, 3, 4)
    watched.outputs.clear()
    for name, value in zip("qkx", (*attentions(watched)[0].inputs[:2], next(iter(watched.nodes)).output), strict=True):
        watched.add_output(name, value)
    found = compute_moments(node, 1, Activations(graph, texts))
    tokens, differing, averaged = (np.zeros((12, 12)) for _ in range(3))
    spread = np.zeros(HEADS)
    for ids in texts:
        at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        rows = interpret(watched, {"input_ids": ids, "position_ids": at}).values()
        for text_q, text_k, embedded in zip(*rows, strict=True):
            x = np.concatenate([embedded, np.ones((len(embedded), 1))], 1)
            q, k = (a.reshape(len(x), -1, D) for a in (text_q, text_k))
            tokens += x.T @ x
            for h in range(HEADS):
                for i in range(len(x)):
                    score = np.exp([q[i, h] @ k[j, h // 2] / np.sqrt(D) for j in range(i + 1)])
                    p = score / score.sum()
                    mean = p @ x[: i + 1]
                    spread[h] += (p * (1 - p)).sum()
                    averaged += np.outer(mean, mean)
                    differing += sum(p[j] * np.outer(x[j] - mean, x[j] - mean) for j in range(i + 1))
    scaled = [m * 12 / np.trace(m) for m in (tokens, differing, averaged)]
    assert measure_difference(scaled[0], found.q) < 1e-9
    assert measure_difference((scaled[0] + scaled[1]) / 2, found.k[0]) < 1e-9
    assert measure_difference((scaled[0] + scaled[2]) / 2, found.v[0]) < 1e-9
    assert measure_difference(spread / spread.mean() + 1e-3, found.spread) < 1e-9


def test_a_text_and_the_order_of_fitting_matter(text: str) -> None:
    graph = EquivalenceCheck().randomize_weights(MODELS["rope"].graph())
    ways = [f", calibration={json.dumps(text)}{more}" for more in ("", ", sequential=false")]
    merged = [applied(f"mha-to-gqa{{kv_heads=2, method=svd{way}}}", graph) for way in ("", *ways)]
    alone, sequential, apart = ([g.params[f"layers.{i}.attn.v.weight"] for i in range(2)] for g in merged)

    def same(left: Param, right: Param) -> bool:
        return bool(np.array_equal(*(p.recipe.evaluate(p.graph.reader) for p in (left, right))))

    assert [same(a, b) for a, b in zip(sequential, apart, strict=True)] == [True, False]
    assert not same(alone[0], apart[0])


def test_it_says_how_far_it_is() -> None:
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


def test_a_layer_applied_twice_keeps_one_set_of_weights(text: str) -> None:
    graph = Graph("twice", MemoryReader(drawn(6, "")))
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    shapes = {"table": (37, WIDTH), "o": (WIDTH, HEADS * D)} | dict.fromkeys("qkv", (HEADS * D, WIDTH))
    made = {
        n: graph.add_param(n, TensorType(dtypes.f32, s), Source(n if n == "table" else f"{n}.weight"))
        for n, s in shapes.items()
    }
    x = ops.embedding(ids, made["table"])
    for _ in range(2):
        q, k, v = (ops.linear(x, made[r]) for r in "qkv")
        x = ops.add(x, ops.linear(ops.attention(q, k, v, heads=HEADS, kv_heads=6), made["o"]))
    graph.add_output("x", x)
    for method in (*METHODS, f"svd, calibration={json.dumps(text)}"):
        merged = applied(f"mha-to-gqa{{kv_heads=2, method={method}}}", graph)
        assert sorted(merged.params) == ["k", "o", "q", "table", "v"]
        run_passes(graph, f"mha-to-gqa{{kv_heads=2, method={method}}}", verify=True)


def test_outputs_make_up_for_what_was_lost(text: str) -> None:
    graph = attention_graph(drawn(6, "qkv"), 6, 4)
    way = f"mha-to-gqa{{kv_heads=1, method=svd, calibration={json.dumps(text)}"
    alone, made_up = (applied(f"{way}{more}}}", graph) for more in (", sequential=false", ""))
    assert alone.params["v.weight"].recipe.evaluate(alone.reader).tolist() == (
        made_up.params["v.weight"].recipe.evaluate(made_up.reader).tolist()
    )
    errors = []
    for merged in (alone, made_up):
        total = 0.0
        for ids in read_tokens(graph, text, 100):
            at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            a, b = (interpret(g, {"input_ids": ids, "position_ids": at})["y"] for g in (graph, merged))
            total += float(((a - b) ** 2).sum())
        errors.append(total)
    assert errors[1] < 0.95 * errors[0]


def test_one_text_or_windows_of_it(tmp_path: Path) -> None:
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
        ("text.txt", b"some words", "the model has no tokenizer; give token ids as a .npy or .json file"),
        ("ids.json", b"[[1, 2], [99]]", "has token 99; the model has 0 to 36"),
        ("ids.json", b'{"ids": [1]}', "a JSON array was expected, not object"),
        ("ids.json", b"[[]]", "has no tokens"),
        ("ids.json", b"[1, ", "not valid JSON"),
        ("ids.npy", b"nothing", "cannot be read"),
        ("ids.npy", b"", "cannot be read"),
        ("ids.json", b"[99999999999999999999]", "has token 99999999999999999999; the model has 0"),
        ("ids.json", b"[" * 100_000, "nested more than 100 deep"),
    ],
)
def test_a_bad_text_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WeftError, match=message):
        applied(f"mha-to-gqa{{kv_heads=1, method=svd, calibration={json.dumps(str(tmp_path / name))}}}", Tiny().graph())


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("mha-to-gqa{kv_heads=4}", Tiny(kv_heads=6), "kv_heads=4 does not divide the 6 key and value heads"),
        ("mha-to-gqa{kv_heads=0}", Tiny(), "must be positive"),
        ("mha-to-gqa{kv_heads=6}", Tiny(kv_heads=2), "kv_heads=6 does not divide the 2"),
        ("kv-cache, mha-to-gqa{kv_heads=1}", Tiny(), "run mha-to-gqa before kv-cache"),
        ('mha-to-gqa{kv_heads=1, calibration="a.npy"}', Tiny(), "method=mean uses no calibration"),
    ],
)
def test_what_is_impossible(text: str, model: Tiny, message: str) -> None:
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
