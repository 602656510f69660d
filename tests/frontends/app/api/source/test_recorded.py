"""Sources that manifests record: read again if they are unchanged, and trusted if they are code."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.frontends.app.api.verify.verification import verify_folder
from weft.ir import WeftError

from ....command import TINY, weft_command


def test_changed_or_missing_source_is_refused(compiled_tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY + "# changed\n")
    result = weft_command("verify", "--trust", compiled_tiny)
    assert result.exit_code == 2
    assert "tiny.py" in result.stderr and "has changed" in result.stderr
    (tmp_path / "tiny.py").unlink()
    assert "cannot be read again" in weft_command("verify", "--trust", compiled_tiny).stderr


def test_recorded_code_runs_only_if_trusted_and_unchanged(compiled_tiny: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(WeftError, match=r"names .*tiny\.py as its source, which is code that this .* add --trust"):
        verify_folder(compiled_tiny)
    (tmp_path / "tiny.py").write_text(f"{TINY}open({str(ran)!r}, 'w')\n")
    with pytest.raises(WeftError, match=r"has changed \(tiny\.py\)"):
        verify_folder(compiled_tiny, trust=True)
    assert not ran.exists()
