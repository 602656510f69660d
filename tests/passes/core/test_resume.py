"""Fits that are stopped: another run goes on where the first was, and finds nothing that belongs to something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, WeftError
from weft.ir.recipes.readers import Array
from weft.passes import Report, run_passes
from weft.passes.core.resume import choose_store, remove_results
from weft.passes.fitting import quantizing

from ..library.quantize.checkpoints import mixture, model
from ..library.quantize.test_quantize import text

__all__ = ["text"]  # a fixture


def numbers(graph: Graph) -> dict[str, Array]:
    return {name: param.recipe.evaluate(graph.reader) for name, param in graph.params.items()}


@pytest.mark.parametrize("build", [model, mixture])
def test_interrupted_run_resumes(build: object, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = f"quantize{{calibration={text}, tokens=512, resume={tmp_path / 'done'}}}"
    assert callable(build)
    whole = numbers(run_passes(build(), f"quantize{{calibration={text}, tokens=512}}"))
    fitted = 0
    original: Any = quantizing.quantize_gptq

    def stopping(*args: object) -> object:
        nonlocal fitted
        fitted += 1
        if fitted == 9:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(quantizing, "quantize_gptq", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_passes(build(), pipeline)
    first = fitted
    kept = sorted((tmp_path / "done").iterdir())
    assert kept and all(path.suffix == ".npz" for path in kept)
    again = numbers(run_passes(build(), pipeline))
    for name, array in whole.items():
        np.testing.assert_array_equal(again[name], array, name)
    total = fitted
    run_passes(build(), pipeline)
    assert fitted == total  # all is there by now
    assert total > first


def test_store_of_a_run_is_used_and_removed(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not part of the pipeline; files of others in it stay."""
    store = choose_store(tmp_path / "out/")
    assert store == tmp_path / "out.partial"
    pipeline, whole = f"quantize{{calibration={text}, tokens=512}}", {}
    for _ in range(2):
        report = Report()
        whole = numbers(run_passes(model(), pipeline, store=store, report=report))
        assert str(report.records[0].applied).startswith("quantize{") and "partial" not in str(
            report.records[0].applied
        )
    assert caplog.messages == [f"quantize: continues with results of an interrupted run, in {store}"]
    for name, array in numbers(run_passes(model(), pipeline)).items():
        np.testing.assert_array_equal(whole[name], array, name)
    (store / "mine.npz").touch()
    remove_results(store)
    assert [path.name for path in store.iterdir()] == ["mine.npz"]
    (store / "mine.npz").unlink()
    remove_results(store)
    assert not store.exists()


def test_results_of_other_settings_are_not_reused(text: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    run_passes(model(), f"quantize{{calibration={text}, tokens=512, resume={done}}}")
    plain = numbers(run_passes(model(), f"quantize{{calibration={text}, tokens=256, bits=3}}"))
    found = numbers(run_passes(model(), f"quantize{{calibration={text}, tokens=256, bits=3, resume={done}}}"))
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array, name)


def test_broken_files_are_computed_again(text: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    pipeline = f"quantize{{calibration={text}, tokens=512, resume={done}}}"
    whole = numbers(run_passes(model(), pipeline))
    files: Sequence[Path] = sorted(done.iterdir())
    files[0].write_bytes(files[0].read_bytes()[:100])
    files[1].write_bytes(b"")
    again = numbers(run_passes(model(), pipeline))
    for name, array in whole.items():
        np.testing.assert_array_equal(again[name], array, name)


def test_unwritable_folder_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeftError, match=r"cannot create the folder .*file/done for results of quantize"):
        run_passes(model(), f"quantize{{calibration={text}, resume={tmp_path / 'file' / 'done'}}}")
