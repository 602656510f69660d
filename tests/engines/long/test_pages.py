"""The pages of the documentation that take minutes together, as tests/test_docs.py runs the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...test_docs import INDEX, LONG, check_page


@pytest.mark.parametrize("name", sorted(LONG))
def test_every_code_block_gives_the_printed_result(
    name: str,
    tiny_llama: Path,
    warm: dict[str, str],
    tmp_path: Path,
    smollm2_gguf: Path,
    minilm_folder: Path,
) -> None:
    check_page(INDEX.with_name(name), tmp_path, smollm2_gguf, minilm_folder, tiny_llama, warm)
