"""Configs with one key changed: what transformers computes, or a refusal that names the key.

`make test` runs one case of each family; ``WEFT_TESTS=all`` runs all, about seventy a family.
"""

from __future__ import annotations

import numpy as np
import pytest

from ..sampling import ALL
from .families import ROWS
from .mutations import Case, cases, others, result

FEW = 1  # cases of a family in a short run
FIRST = {row.family: name for name, row in reversed(ROWS.items()) if row.is_decoder or row.is_encoder}  # one a family


def chosen(name: str) -> list[Case]:
    """The cases of the row `name` that are run."""
    known = list(cases(name))
    if ALL:
        return known
    rng = np.random.default_rng(sum(map(ord, name)))  # others in each family, always the same
    return [known[i] for i in rng.choice(len(known), FEW, replace=False)]


@pytest.mark.halved
@pytest.mark.parametrize("family", sorted(FIRST))
def test_changed_config_key_is_applied_or_refused(family: str) -> None:
    found = {str(case): result(case) for case in chosen(FIRST[family])}
    assert {case: what for case, what in found.items() if what not in ("equal", "refused", "no model")} == {}


# Cases that were wrong once.
WRONG = [
    ("gemma2", "hidden_activation", "gelu"),
    ("gemma3", "hidden_activation", "gelu"),
    ("gemma", "hidden_activation", "relu"),
    ("llama-gqa-tied", "partial_rotary_factor", 0.5),
    ("mistral-gqa", "attention_bias", True),
    ("gpt_neox", "head_dim", 12),
    ("mpt", "expansion_ratio", 2),
    ("olmo2-gqa", "mlp_bias", True),
    ("deepseek-v3", "mlp_bias", True),
    ("afmoe", "routed_scaling_factor", 3.0),
    ("jetmoe", "rms_norm_eps", 0.25),
    ("phi", "hidden_size", 65),
    ("squeezebert", "layer_norm_eps", 0.25),
    ("deberta", "pos_att_type", ["p2c", "p2c"]),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_former_mutation_failures_stay_fixed(name: str, key: str, value: object) -> None:
    assert result(Case(name, key, value)) in ("equal", "refused")


def test_mutation_check_detects_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a model that computes something else, and a refusal that does not name the key."""
    from weft.ir import WeftError

    from . import mutations

    case = Case("llama-gqa-tied", "rms_norm_eps", 0.25)
    assert result(case) == "equal"
    computed = mutations.computed
    monkeypatch.setattr(mutations, "computed", lambda graph, ids: computed(graph, ids) * 1.01)
    assert result(case).startswith("wrong by")

    def refuse(folder: object) -> None:
        raise WeftError("no")

    monkeypatch.setattr(mutations, "load_source", refuse)
    assert result(case) == "refused without the key: no"


def test_mutations_cover_other_values() -> None:
    assert others("use_bias", True) == [False]
    assert others("hidden_size", 64) == [32, 65, 128]
    assert others("layer_types", ["a", "b"]) == [["b", "a"], ["a", "a"], ["b", "b"]]
    assert others("sliding_window", None) == [8]
