"""Certificates: what a record states is checked again, and each kind of change is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.frontends.app.api.certificate import certify, record_verification
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.source.sources import load_source
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.formats.weft.model_folder import write_model
from weft.ir import WeftError
from weft.ir.storage import MANIFEST, PROVENANCE, amend_manifest
from weft.ir.storage.contents import hash_file

from ...command import done, weft_command

PASSES = {"mha-to-gqa{kv_heads=1}": "lossy", "pack-qkv": "exact"}
TOKENS = ("--tokens", "24", "--device", "cpu")


@pytest.fixture
def home(llamas: tuple[Path, Path], prose: Path, tmp_path: Path) -> Path:
    """A source, a model folder that a pass changed, the folder compiled from it, a text."""
    shutil.copytree(llamas[0], tmp_path / "source")
    shutil.copy(prose, tmp_path / "text.txt")
    model = rewrite(load_source(tmp_path / "source"), ", ".join(PASSES), verify=True)
    write_model(model, tmp_path / "rewritten")
    weft.compile(tmp_path / "rewritten", tmp_path / "out", max_length=128, verify=True)
    return tmp_path


def evaluate(home: Path, folder: str) -> None:
    against = ("--against", home / "source", "--text", home / "text.txt")
    done("eval", home / folder, *against, *TOKENS, "--record")


def reasons(folder: Path, **options: Any) -> str:
    """The checks that do not hold."""
    return "; ".join(" ".join(check) for check in certify(folder, **options).checks if check[2])


def test_passes_of_all_steps_are_recorded_with_effects_and_checks(home: Path) -> None:
    for folder, manifest in (("rewritten", PROVENANCE), ("out", MANIFEST)):
        record = json.loads((home / folder / manifest).read_text())
        passes = {step["pass"]: step for step in record["passes"]}
        assert all(step["checked"] and step["effect"] for step in passes.values())
    assert passes["kv-cache"]["effect"] == "conditional" and "seconds" not in passes["kv-cache"]
    nested = record["source"]["provenance"]["passes"]
    assert [(step["pass"], step["effect"]) for step in nested] == list(PASSES.items())
    assert nested[1]["rewrites"] == {"pack-qkv": 3} and nested[1]["difference"] < 1e-12
    (table,) = (t for t in certify(home / "out").tables if t.title == "Passes")
    assert [row[1] for row in table.rows[:2]] == ["lossy", "exact"] and "Largest difference" in table.rows[1][3]


def test_untouched_folder_holds(home: Path) -> None:
    checks = certify(home / "out").checks
    assert {status for status, _, _ in checks} == {"holds"}
    names = {statement.partition(" of the source ")[0] for _, statement, _ in checks}
    assert {"config.json", "model.safetensors", "model.weft"} <= names  # of the source, and of the model folder


def test_changes_and_missing_files_are_found(home: Path) -> None:
    with (home / "out/genai_config.json").open("a") as file:
        file.write(" ")
    with (home / "source/config.json").open("a") as file:
        file.write(" ")
    shutil.rmtree(home / "rewritten")
    statements = reasons(home / "out")
    assert "files have their checksums genai_config.json was modified" in statements
    assert f"FAILS config.json of the source {home}/source it has changed" in statements
    assert f"not checked model.weft of the source {home}/rewritten it is not here" in statements
    assert weft_command("certificate", home / "out").exit_code == 1


def test_models_of_runs_are_checked(home: Path) -> None:
    (home / "run").mkdir()
    (home / "run" / "run.json").write_text("{}")
    (home / "rewritten").rename(home / "run" / "best")
    assert certify(home / "run").checks == certify(home / "run" / "best").checks
    weft.compile(home / "run", home / "of_run", max_length=128)
    assert not reasons(home / "of_run")
    with (home / "run/best/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    assert "model.safetensors of the source" in reasons(home / "of_run") and "has changed" in reasons(home / "of_run")


def test_recorded_evaluation_is_repeated(home: Path) -> None:
    evaluate(home, "out")
    evaluate(home, "out")  # replaces the first
    record = json.loads((home / "out" / MANIFEST).read_text())
    (entry,) = record["measurements"]
    assert entry["tokens"] == 24 and entry["scores"]["kl"] > 0
    assert "--recheck repeats it" in reasons(home / "out")
    assert not reasons(home / "out", recheck=True, device="cpu")
    (home / "text.txt").rename(home / "moved.txt")
    assert "is not here or has changed: name it with --text" in reasons(home / "out", recheck=True)
    assert not reasons(home / "out", recheck=True, moved=[home / "moved.txt"], device="cpu")


def test_measurements_of_earlier_folders_are_named_and_outlive_exports(home: Path) -> None:
    evaluate(home, "rewritten")
    export(home / "rewritten", home / "exported")
    write_model(rewrite(load_source(home / "exported"), "prune-neurons{keep=0.5}"), home / "again")
    tables = {table.title: table.rows for table in certify(home / "again").tables}
    assert [row[0] for row in tables["Passes"]] == [*PASSES, "prune-neurons{keep=0.5}"]
    (row,) = tables["Measurements"]
    assert row[0].startswith(f"eval of {home / 'rewritten'}: against")


def test_training_is_recorded(tiny: Path, prose: Path, tmp_path: Path) -> None:
    settings = weft.TrainingSettings(steps=2, batch=2, context=8)
    run = weft.train(str(tiny), prose, tmp_path / "run", settings, device="cpu", tokenizer="bytes")
    (row,) = next(table.rows for table in certify(run.folder).tables if table.title == "Training")
    assert row[:2] == ("weft train", f"{prose.name}, SHA-256 {hash_file(prose)}")
    assert row[2] == "2 steps of 2 windows of 8 tokens, seed 0" and row[3].endswith(f"{run.best:.5g}")


def test_wrong_score_fails_although_the_seal_is_intact(home: Path) -> None:
    """A forged record whose checksum is right."""
    evaluate(home, "rewritten")
    record = json.loads((home / "rewritten" / PROVENANCE).read_text())
    (entry,) = record["measurements"]
    entry["scores"]["kl"] *= 0.5
    amend_manifest(home / "rewritten", {"measurements": [entry]})
    assert "not checked evaluation against" in reasons(home / "rewritten")
    assert f"FAILS evaluation against {home}/source kl is " in reasons(home / "rewritten", recheck=True, device="cpu")


def test_verification_is_recorded_and_repeated(home: Path) -> None:
    done("verify", home / "out", "--tokens", "2", "--record")
    assert not reasons(home / "out", recheck=True)
    result = verify_folder(home / "out", tokens=2)
    object.__setattr__(result, "max_relative", 1.0)  # as of a model that is wrong
    record_verification(home / "out", result, {"against": None, "prompt": "x", "tokens": 2})
    assert "it failed when it was recorded" in reasons(home / "out")


def test_exported_folder_has_a_model_card_that_follows_the_record(home: Path) -> None:
    export(home / "rewritten", home / "hf", passes="unpack")
    card = (home / "hf/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- weft\n---\n")
    assert "| mha-to-gqa{kv_heads=1} | lossy | 3 |" in card and "| unpack | exact |" in card
    evaluate(home, "hf")
    again = (home / "hf/README.md").read_text()
    assert again.startswith(card.rstrip("\n")) and "| ΔNLL " in again
    assert all(status != "FAILS" for status, _, _ in certify(home / "hf").checks)


def test_architecture_in_a_record_runs_only_with_trust(tiny: Path, prose: Path, tmp_path: Path) -> None:
    weft.compile(tiny, tmp_path / "out")
    entry = {"kind": "evaluation", "against": str(tiny), "text": str(prose), "sha256": hash_file(prose)}
    amend_manifest(tmp_path / "out", {"measurements": [entry | {"tokens": 8, "context": 8, "scores": {}}]})
    assert "which is code that this would run; if you trust whoever wrote it" in reasons(tmp_path / "out", recheck=True)


def test_folder_without_a_record_is_refused(llamas: tuple[Path, Path]) -> None:
    with pytest.raises(WeftError, match=r"cannot be checked: it has no weft\.json or provenance\.json with checksums"):
        certify(llamas[0])
