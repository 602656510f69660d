"""The search finds a hundred faults of seven architectures, and names their operators and kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.frontends.app.api.bisect.bisection import bisect
from weft.frontends.app.api.bisect.search import Array, list_patterns
from weft.frontends.app.api.bisect.sides import trace_graph
from weft.frontends.app.api.verify.internals import make_inputs

from .....sampling import others_long
from .fault_edits import edit_onnx
from .faults import MODELS, Fault, inject_graph, inject_module, write_model
from .faults_of_llama import list_llama_faults
from .faults_of_others import list_other_faults

IDS = [82, 61, 49, 26, 57, 3, 7, 1, 17, 78, 62, 88]
Sides = dict[str, Any]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sides]:
    """By model: its graph, its module of transformers, its compiled folder, and the modules of the graph's values."""
    home, found = tmp_path_factory.mktemp("models"), {}
    for name in MODELS:
        module = write_model(name, home / name)
        weft.compile(home / name, home / f"{name}-onnx")
        graph = weft.load_source(home / name).graph
        labels = trace_graph(graph, make_inputs(graph.inputs, IDS, IDS)).labels
        found[name] = {"graph": graph, "module": module, "onnx": home / f"{name}-onnx", "labels": labels}
    return found


def inject(fault: Fault, sides: Sides, out: Path) -> Any:
    if fault.side == "onnx":
        return edit_onnx(sides["onnx"], out, fault.inject)
    return (inject_graph if fault.side == "graph" else inject_module)(fault, sides[fault.side])


@pytest.mark.parametrize("name", MODELS)
def test_equal_models_do_not_differ(name: str, sides: dict[str, Sides]) -> None:
    graph, module, folder = (sides[name][side] for side in ("graph", "module", "onnx"))
    for a, b in ((graph, module), (module, folder), (folder, f"optimized:{folder}")):
        found = bisect(a, b, ids=IDS)
        assert not found.differs and found.difference is None and 0 <= max(found.errors.values()) < found.tolerance


@pytest.mark.parametrize("part", others_long(range(3)))
def test_faults_are_found_at_their_operator(part: int, sides: dict[str, Sides], tmp_path: Path) -> None:
    """Each fault is in one side; the other is the interpreter, ONNX Runtime or transformers, in either order."""
    numbered, missed, unnamed, other_kinds = enumerate([*list_llama_faults(), *list_other_faults()]), [], [], []
    faults = list(numbered)[part::3]
    for i, fault in faults:
        faulty, right = inject(fault, sides[fault.model], tmp_path / str(i)), sides[fault.model][fault.against]
        found = bisect(*((faulty, right) if i % 2 else (right, faulty)), ids=IDS)
        if (difference := found.difference) is None:
            missed.append(str(fault))
            continue
        place = difference.places[difference.at]
        names = {*difference.values, *place.makes, sides[fault.model]["labels"].get(place.name)}
        if names.isdisjoint(fault.names):
            unnamed.append(f"{fault}: {difference}")
        elif difference.kind not in fault.kinds:
            other_kinds.append(f"{fault}: {difference.kind}, {difference.describe()}")
        assert found.differs
    assert len(faults) >= 34 and missed == []
    assert len(unnamed) <= 0.05 * len(faults), unnamed
    assert len(unnamed + other_kinds) <= 0.1 * len(faults), unnamed + other_kinds


def test_explanations_state_the_change(sides: dict[str, Sides]) -> None:
    graph = sides["llama"]["graph"].clone()
    next(n for n in graph.nodes if n.output.name == "layers.1.ffn_norm").attrs["eps"] = 0.01
    found = bisect(graph, sides["llama"]["onnx"], ids=IDS).difference
    assert found is not None and found.values == ("layers.1.ffn_norm", "layers.1.ffn_norm")
    assert (
        found.describe()[0].startswith("both agree (error ")
        and "in A, eps is 1e-06 instead of 0.01" in found.describe()[0]
    )
    assert [place.op for place in found.places] == ["rms_norm", "SkipSimplifiedLayerNormalization"]


def test_later_values_are_tried_if_the_first_have_no_common_name(sides: dict[str, Sides]) -> None:
    """Routing weights have no counterpart in transformers; the experts after them have."""
    graph = sides["mixtral"]["graph"].clone()
    next(n for n in graph.nodes if n.output.name == "layers.0.ffn.moe").attrs["activation"] = "relu"
    found = bisect(graph, sides["mixtral"]["module"], ids=IDS).difference
    assert found is not None and found.places[0].name == "layers.0.ffn.moe" and found.kind == "activation"


def test_faults_that_a_norm_hides_are_found_where_they_are(sides: dict[str, Sides]) -> None:
    graph = sides["llama"]["graph"]
    for name, node in (("embed.weight", "embed"), ("layers.1.ffn.up.weight", "layers.1.ffn.up")):
        weights = weft.state_dict(graph)
        scaled = weft.with_weights(graph.clone(), {**weights, name: 1.001 * weights[name]})
        found = bisect(graph, scaled, ids=IDS).difference
        assert found is not None and found.places[0].name == node
        assert found.kind == "factor" and "is multiplied by 1.001" in found.describe()[0]


def test_scaled_embeddings_of_a_module_are_found(sides: dict[str, Sides]) -> None:
    """A norm hides the scale, except for its eps; the residual stream does not."""
    module = copy.deepcopy(sides["llama"]["module"])
    module.model.embed_tokens.register_forward_hook(lambda part, inputs, output: output * 32**0.5)
    found = bisect(sides["llama"]["graph"], module, ids=IDS).difference
    assert found is not None and found.at == 1 and found.places[1].name == "model.embed_tokens"
    assert "is 1 instead of 5.65685" in found.describe()[0]


def test_other_weights_are_named(sides: dict[str, Sides]) -> None:
    graph = sides["llama"]["graph"].clone()
    name, random = "layers.1.attn.o.weight", np.random.default_rng(0).normal(size=(32, 32))
    graph = weft.with_weights(graph, {**weft.state_dict(graph), name: __import__("torch").tensor(random)})
    found = bisect(graph, sides["llama"]["onnx"], ids=IDS).difference
    assert found is not None and found.places[found.at].name == "layers.1.attn.o" and found.kind == "weight"
    assert found.describe()[0].endswith(f"in A, {name} is {name} of the other model")


X = np.random.default_rng(0).normal(size=(1, 7, 16))


def with_row(x: Array) -> Array:
    y = x.copy()
    y[:, 3:] += 0.1
    return y


def with_feature(x: Array) -> Array:
    y = x.copy()
    y[..., 5] = 0
    return y


def with_column(x: Array) -> Array:
    """The difference is an outer product, as one differing column of a weight causes it."""
    return x + np.random.default_rng(1).normal(size=(7, 1)) * np.random.default_rng(2).normal(size=16)


PATTERNS: list[tuple[str, str, Callable[[Array], Array]]] = [
    ("permuted features", "features", lambda x: x[..., np.random.default_rng(3).permutation(16)]),
    ("rounding", "bf16", lambda x: x.astype(np.float32).view(np.uint32).__and__(0xFFFF0000).view(np.float32)),
    ("positions", "from 3 on, of 7", with_row),
    ("features", "5, of 16", with_feature),
    ("feature factors", "own factor", lambda x: x * np.linspace(1, 2, 16)),
    ("input feature", "rank one", with_column),
]


@pytest.mark.parametrize(("kind", "text", "change"), PATTERNS, ids=[kind for kind, *_ in PATTERNS])
def test_patterns_are_found_first(kind: str, text: str, change: Callable[[Array], Array]) -> None:
    (found, sentence), *_ = list_patterns(X, np.asarray(change(X), np.float64), 1e-6)
    assert found == kind and text in sentence


def test_unrelated_values_have_no_pattern() -> None:
    assert list(list_patterns(X, np.random.default_rng(9).normal(size=X.shape), 1e-6)) == []
    assert list(list_patterns(X * np.nan, X, 1e-6)) == []
