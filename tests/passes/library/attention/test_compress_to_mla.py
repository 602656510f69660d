"""compress-to-mla: exact where nothing is lost, near where little is, and the cache that is left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.ir import Graph, WeftError, interpret, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, measure_difference

from ...fitting.head_graphs import HEADS, RNG, WIDTH, D, attention_graph, attentions, drawn
from ...models import Tiny, applied
from ...rewrites import Rewrite, rewrites


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    ids = RNG(3).integers(0, 37, (2, 7))
    return {n: ids if n == "input_ids" else np.broadcast_to(np.arange(7), (2, 7)) for n in graph.inputs}


def differ(a: Graph, b: Graph) -> float:
    return measure_difference(interpret(a, feeds(a))["y"], interpret(b, feeds(b))["y"])


def planted(kv_heads: int, rank: int, pairs: int, biases: str) -> dict[str, np.ndarray]:
    """Weights whose keys, from feature 2·`pairs` on, and values are products of a latent of `rank`; the first features
    of keys are the same up to a complex factor for each pair, which is the freedom of the rotation."""
    rng, weights = RNG(1), drawn(kv_heads, biases)
    down = rng.standard_normal((rank, WIDTH + 1)) / 3
    one = rng.standard_normal((2, pairs, WIDTH + 1))
    for role in "kv":
        w = rng.standard_normal((kv_heads, D, rank)) @ down
        if role == "k":
            rotated = (one[0] + 1j * one[1]) * np.exp(1j * rng.uniform(0, 6, (kv_heads, pairs)))[..., None]
            w[:, :pairs], w[:, pairs : 2 * pairs] = rotated.real, rotated.imag
        weights[f"{role}.weight"] = w.reshape(-1, WIDTH + 1)[:, :-1].copy()
        if f"{role}.bias" in weights:
            weights[f"{role}.bias"] = w.reshape(-1, WIDTH + 1)[:, -1].copy()
    return weights


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("calibrated", [False, True], ids=["weights", "text"])
@pytest.mark.parametrize("biases", ["", "qkv"], ids=["no biases", "biases"])
@pytest.mark.parametrize("pairs", [0, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_keys_and_values_of_a_latent_are_compressed_without_loss(
    text: str, kv_heads: int, pairs: int, biases: str, calibrated: bool
) -> None:
    weights = planted(kv_heads, 5, pairs, biases)
    graph = attention_graph(weights, kv_heads, pairs)
    calibration = f", calibration={json.dumps(text)}" if calibrated else ""
    compressed = run_passes(graph, f"compress-to-mla{{rank=5, rotary={2 * pairs}{calibration}}}", verify=True)
    assert differ(graph, compressed) <= EXACT
    absorbed = run_passes(compressed, "mla-absorb", verify=True)
    (node,) = attentions(absorbed)
    assert (node.attrs["kv_heads"], node.operand("v"), node.required_operand("k").width) == (1, None, 5 + 2 * pairs)
    assert differ(graph, absorbed) <= EXACT
    smaller = applied(f"compress-to-mla{{rank=4, rotary={2 * pairs}}}", graph)
    assert differ(graph, smaller) > 0.01


@pytest.mark.parametrize("rotary", [0, 2])
def test_errors_of_scores_and_outputs_are_those_of_the_best_basis(rotary: int) -> None:
    """Changes of the basis, with the best maps for it, raise the sum of both errors, each relative to its total."""
    weights, rank = drawn(3, ""), 7
    graph = attention_graph(weights, 3, rotary // 2)
    latent = applied(f"compress-to-mla{{rank={rank}, rotary={rotary}, sequential=false}}", graph)
    rows = np.arange(rotary, D)  # those that the graph never rotates
    q, k, v = (weights[f"{r}.weight"].reshape(-1, D, WIDTH) for r in "qkv")
    o = weights["o.weight"].reshape(WIDTH, HEADS, D).swapaxes(0, 1)

    def measure(basis: np.ndarray) -> float:
        kept = np.eye(WIDTH) - np.linalg.pinv(basis) @ basis  # what the basis cannot express
        total = 0.0
        for read, made in ((q[:, rows], k[:, rows]), (o.swapaxes(1, 2), v)):
            all_, lost = (
                sum(np.square(read[h].T @ made[h // 2] @ p).sum() for h in range(HEADS)) for p in (np.eye(WIDTH), kept)
            )
            total += lost / all_
        return total

    basis = latent.params["latent.weight"].recipe.evaluate(latent.reader)
    assert basis.shape == (rank, WIDTH)
    best, rng = measure(basis), RNG(5)
    assert 0.01 < best < 2
    for _ in range(20):
        assert measure(basis + 0.1 * rng.standard_normal(basis.shape)) > best


def test_text_lowers_the_error_on_this_text(text: str) -> None:
    graph = attention_graph(drawn(6, ""), 6, 4)
    inputs = {
        "input_ids": np.array(json.loads(Path(text).read_text())[:2]),
        "position_ids": np.arange(18).reshape(2, 9) % 9,
    }
    plain, fitted = (
        measure_difference(
            *(interpret(g, inputs)["y"] for g in (graph, applied(f"compress-to-mla{{rank=9, rotary=4{more}}}", graph)))
        )
        for more in ("", f", calibration={json.dumps(text)}")
    )
    assert fitted < 0.8 * plain


def test_the_highest_frequencies_stay_and_all_heads_share_them() -> None:
    compressed = run_passes(Tiny(head_dim=8).graph(), "compress-to-mla{rank=6, rotary=4}", verify=True)
    (frequencies,) = (p.recipe for n, p in compressed.params.items() if "frequencies" in n)
    np.testing.assert_allclose(frequencies.evaluate(compressed.reader), RopeFrequencies(8).frequencies()[:2], rtol=1e-6)
    ropes = [n for n in compressed.nodes if n.op is ops.rope]
    assert [n.attrs["heads"] for n in ropes] == [6, 1] * 2


@pytest.mark.parametrize(
    ("model", "arguments", "reason"),
    [
        (Tiny(), "rank=6, rotary=4", "its keys stay rotated entirely, which leaves no features for a latent"),
        (Tiny(), "rank=15, rotary=2", "rank=15 and 2 rotated features exceed the 16 of its keys and values"),
        (Tiny(qk_norm=True), "rank=6, rotary=2", "rms_norm (%layers.0.attn.rms_norm) is between the linear and the"),
    ],
)
def test_refusals(model: Tiny, arguments: str, reason: str) -> None:
    trace, graph = Trace(), model.graph()
    assert applied(f"compress-to-mla{{{arguments}}}", graph, trace) == graph
    assert any(r.reason.startswith(reason) for r in trace.refusals), trace.refusals


@pytest.mark.parametrize("arguments", ["rank=0, rotary=2", "rank=3, rotary=3", "rank=3, rotary=-2"])
def test_impossible_sizes_are_errors(arguments: str) -> None:
    with pytest.raises(WeftError, match="must be positive, and rotary="):
        run_passes(Tiny().graph(), f"compress-to-mla{{{arguments}}}")


def test_missing_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="gone"):
        run_passes(Tiny().graph(), f'compress-to-mla{{rank=3, rotary=2, calibration="{tmp_path}/gone.txt"}}')
