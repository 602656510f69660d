"""Pipelines from files and by their published names, and models rewritten by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import WeftError, load_source
from weft.frontends.app.api.rewrite import resolve_pipeline, rewrite
from weft.passes import Report, parse_pipeline

PIPELINE = """
# smaller
pack-qkv          # as one
fuse: cast{
    dtype = bf16  # in several lines
}
cache: kv-cache, dce

-dce
"""


def test_pipelines_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text(PIPELINE)
    (tmp_path / "steps.pipeline").write_text(PIPELINE)
    text = resolve_pipeline(f"@{tmp_path / 'steps.txt'}")
    assert text == "pack-qkv; fuse: cast{ dtype = bf16 }; cache: kv-cache, dce, -dce"
    assert str(parse_pipeline(text)) == "pack-qkv; fuse: cast{dtype=bf16}; cache: kv-cache"
    assert resolve_pipeline(str(tmp_path / "steps.pipeline")) == text
    assert resolve_pipeline(" dce, cse") == "dce, cse"


def test_unknown_pipeline_files_name_the_published_pipelines() -> None:
    with pytest.raises(WeftError, match=r"the pipeline file gone cannot be read: .*; @best-int4 and @best-int3 are"):
        resolve_pipeline("@gone")
    *exact, last = parse_pipeline(resolve_pipeline("@best-int3")).passes
    assert {step.effect for step in exact} == {"exact"} and str(last) == "quantize{bits=3}"


def test_rewritten_model_records_its_pipelines_and_keeps_settings_of_exact_ones(tiny: Path) -> None:
    model, report = load_source(tiny), Report()
    assert rewrite(model, "") is model
    packed = rewrite(model, "pack-qkv", report=report)
    assert [record.applied.name for record in report.records] == ["pack-qkv"]
    assert len(packed.graph.nodes) < len(model.graph.nodes) and packed.pipeline == "pack-qkv"
    assert rewrite(packed, "dce").pipeline == "pack-qkv; dce"
    assert rewrite(model, "cast{dtype=f16}").settings is None
