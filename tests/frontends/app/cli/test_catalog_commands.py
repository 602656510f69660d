"""`weft ops`, `weft targets`, `weft families`, `weft presets`: the lists, and one of each."""

from __future__ import annotations

import json

import pytest

from weft.frontends.models.families import FAMILIES

from ...command import done, refused


def test_ops_are_listed_and_shown() -> None:
    from weft.ir.op import OPS

    listed = done("ops").stdout
    assert all(name in listed for name in OPS)
    shown = done("ops", "attention").stdout
    assert all(word in shown for word in ("kv_heads", "GroupQueryAttention", "ort-cuda", "f32[", "softmax"))
    assert "did you mean attention" in refused("ops", "atention")


@pytest.mark.parametrize("name", ["rms_norm", "concat", "embedding", "moe"])
def test_every_kind_of_op_can_be_shown(name: str) -> None:
    assert done("ops", name).stdout.startswith(f"{name}(")


def test_targets_are_listed_and_shown() -> None:
    from weft.backends.options import OptionKeywords
    from weft.backends.target import TARGETS, collect_options

    rows = {line.split()[0]: line for line in done("targets").stdout.splitlines()[2:]}
    assert [*rows] == [*TARGETS]
    assert "f16, bf16" in rows["ort-cuda"] and "--activations" in rows["torch"]
    shown = done("targets", "ort-cpu").stdout
    assert shown.startswith("ort-cpu: ONNX Runtime on a CPU\n\nruns on: cpu, by ONNX Runtime\n")
    assert "passes that it leaves out: pack-gate-up" in shown and "head | all" in shown
    listed = json.loads(done("targets", "--json").stdout)
    assert [target["name"] for target in listed] == [*TARGETS]
    (one,) = json.loads(done("targets", "torch", "--json").stdout)
    assert one["options"]["cache_dtype"]["default"] == "" and one["dtypes"] == ["f32", "bf16", "f16"]
    assert "did you mean onnx" in refused("targets", "onx")
    assert set(OptionKeywords.__annotations__) == set(collect_options())


def test_families_are_listed_and_shown() -> None:
    lines = done("families").stdout.splitlines()
    assert lines[0].split() == ["family", "exported", "GGUF"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["llama"] == ["LlamaForCausalLM", "llama+"]
    assert rows["bert"] == ["bert"]  # read from GGUF files, exported to none
    assert {*rows} == {*FAMILIES}
    shown = done("families", "bert").stdout.splitlines()
    assert shown == ["Hugging Face folders: read", "GGUF files of bert: read"]
    shown = done("families", "mistral").stdout.splitlines()
    assert shown == [
        "Hugging Face folders: read, and exported for MistralForCausalLM",
        "GGUF files of llama: read and exported",
    ]
    assert "did you mean gemma2" in refused("families", "gema2")


def test_presets_are_listed_and_shown() -> None:
    rows = {line.split()[0]: line.split()[1:] for line in done("presets").stdout.splitlines() if line}
    assert " ".join(rows["deepseek-v3"]).startswith("671 G 37.6 G 68.6 KiB 163,840 DeepSeek-V3")
    assert " ".join(rows["mistral-7b"]).startswith("7.24 G 128.0 KiB 32,768 Mistral")
    assert " ".join(rows["mamba-2.8b"]).startswith("2.77 G 21.9 MiB Mamba")
    shown = done("presets", "gpt2").stdout
    assert "Decoder(" in shown and "124,439,808 parameters" in shown
    assert "gpt2" in refused("presets", "gpt-2")
