"""Tables: rules over config keys, tensor names with prefixes and aliases, derived tables, errors that name keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.family import (
    Family,
    Fetch,
    Lookup,
    blame_keys,
    key,
    mask_layers,
    read_required,
    tabulate_families,
)
from weft.frontends.models.tables.settings import Settings
from weft.ir import WeftError

from ....supported import page, read_errors, read_genai

TABLE = Family(
    model_types=("small",),
    settings={
        "vocab": key("v"),
        "dim": key("d"),
        "layers": key("n", default=2),
        "logit_scale": key("s", reciprocal=True, default=1.0),
    },
    names={"embed": "wte", "embed.bias": "other", "layers.{i}.attn.q": "h.{i}.q"},
    prefix="model.",
    aliases={"h.": "blocks."},
    refuse={"inner.flag": (False, None)},
    transformers="SmallModel",
)
CONFIG = {"v": 5, "d": 4}


def names(parameter: str, *keys: str) -> list[str]:
    recipe = TABLE.recipe(parameter, TABLE.read(CONFIG, frozenset(), "c"), frozenset(keys))
    assert recipe is not None
    return list(recipe.sources())


def test_lookups_take_the_first_key_that_is_not_null() -> None:
    rule = key("a", "b", default=7)
    assert (rule({"a": 1, "b": 2}), rule({"a": None, "b": 2}), rule({})) == (1, 2, 7)
    assert key("a", reciprocal=True)({"a": 4}) == 0.25
    with pytest.raises(TypeError):  # null has no reciprocal
        key("a", default=1.0, reciprocal=True)({"a": None})
    with pytest.raises(WeftError, match=r"^key 'a' is missing$"):
        key("a", "b")({})
    assert read_required({"a": 1, "b": 2}, "b", "a") == (2, 1)


def test_masked_layers_are_none() -> None:
    rule = mask_layers(lambda c: c["x"], lambda c: [True, False, True])
    assert rule({"x": 3}) == (3, None, 3)
    assert mask_layers(lambda c: c["x"], lambda c: [False])({}) == (None,)  # the value is not computed


def test_tensors_are_found_by_any_spelling() -> None:
    for stored in ("h.1.q.weight", "model.h.1.q.weight", "blocks.1.q.weight", "model.blocks.1.q.weight"):
        assert names("layers.1.attn.q.weight", stored) == [stored]
    assert names("layers.1.attn.q.weight") == ["model.h.1.q.weight"]  # the expected name
    assert (names("embed.weight"), names("embed.bias")) == (["model.wte.weight"], ["model.other"])
    assert TABLE.recipe("final_norm.weight", TABLE.read(CONFIG, frozenset(), "c"), frozenset()) is None


def test_heads_never_have_the_prefix() -> None:
    fetch = Fetch(frozenset(["x"]), "model.", {}, "3")
    assert list(fetch("lm_head.weight").sources()) == ["lm_head.weight"]
    assert fetch.has("x") and not fetch.has("y")


def test_settings_and_refusals() -> None:
    s = TABLE.read({**CONFIG, "s": 4}, frozenset(), "c")
    assert (s.vocab, s.dim, s.layers, s.logit_scale, s.kind) == (5, 4, 2, 0.25, "decoder")
    assert TABLE.to_config(s) == {"v": 5, "d": 4, "n": 2, "s": 4.0}
    for config, message in (
        ({"inner": {"flag": True}}, "^c: inner.flag=True is not supported for small models$"),
        ({"inner": 3}, "^c: inner=3 is not a mapping$"),
        ({"d": "x"}, r"^c: d='x': the value 'x' must be of type int \(for dim of small models\)$"),
        ({"d": None}, r"^c: key 'd' is missing \(for dim of small models\)$"),
    ):
        with pytest.raises(WeftError, match=message):
            TABLE.read({**CONFIG, **config}, frozenset(), "c")


def test_derived_tables_extend_mappings_and_drop_the_class() -> None:
    derived = TABLE.derive("other", names={"embed": "tokens", "embed.bias": None}, dim=8, prefix="p.")
    assert (derived.model_types, derived.transformers, derived.prefix) == (("other",), "", "p.")
    assert derived.names == {"embed": "tokens", "layers.{i}.attn.q": "h.{i}.q"}
    assert derived.read({"v": 5}, frozenset(), "c").dim == 8
    assert TABLE.names["embed"] == "wte" and TABLE.transformers == "SmallModel"


def test_errors_blame_the_keys_that_cause_them() -> None:
    def make(config: Any) -> Any:
        if config.get("heads", 1) * 2 != config["dim"]:
            raise WeftError(f"{config.get('heads', 1)} heads do not divide {config['dim']}")

    config = {"heads": 3, "dim": 7, "other": 1}
    with pytest.raises(WeftError) as e:
        make(config)
    assert str(blame_keys(e.value, make, config)) == "heads=3: dim=7: 3 heads do not divide 7"


def test_families_have_all_their_names() -> None:
    assert FAMILIES["xlm-roberta"] is FAMILIES["roberta"]
    assert isinstance(FAMILIES["llama"].settings["dim"], Lookup)
    assert Settings(5, 4, 2).head_size == 4


def test_supported_page_is_generated(root: Path) -> None:
    assert (root / "docs" / "supported.md").read_text(encoding="utf-8") == page()


def test_overview_rows_follow_the_tables() -> None:
    head, *rows = tabulate_families(FAMILIES)
    assert head == ("family", "exported", "GGUF")
    assert len(rows) == len(FAMILIES)
    for name, exported, gguf in rows:
        table = FAMILIES[name]
        assert exported == table.transformers
        assert gguf.rstrip("+") == ("" if table.gguf is None else table.gguf.model_types[0])


def test_page_rows_show_the_measurements() -> None:
    errors, genai = read_errors(), read_genai()
    table = page().partition("| family |")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    assert [row[0] for row in rows] == sorted(errors)
    for name, _, _, marked, *worst in rows:
        assert bool(marked) == (name in genai)
        assert [float(e) for e in worst] == [max(errors[name][t].values()) for t in ("onnx", "ort-cpu", "torch")]
        assert float(worst[1]) <= 1e-4
