"""Code of a folder runs only with the user's consent."""

from __future__ import annotations

import pytest

from weft.backends.runtime.trust import require_trust
from weft.ir import WeftError


def test_code_needs_consent() -> None:
    require_trust(True, "out/model.py is code")
    with pytest.raises(WeftError) as caught:
        require_trust(False, "out/model.py is code")
    words = "out/model.py is code; if you trust whoever wrote it, add --trust (in Python trust=True)"
    assert str(caught.value) == words
