"""References that checks compare with, against PyTorch and formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weft.passes.core.oracle import attend


def test_the_oracle_is_attention() -> None:
    """The definition that checks compare with, against torch."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 6, 12)), rng.standard_normal((2, 6, 6)), rng.standard_normal((2, 6, 6))
    seen = torch.tensor([[abs(i - j) < 3 or j < 1 for j in range(6)] for i in range(6)])
    by_head = [torch.from_numpy(x).unflatten(2, (-1, 3)).transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=seen, scale=0.7, enable_gqa=True)
    plain: dict[str, Any] = {"heads": 4, "kv_heads": 2, "causal": False, "softcap": None, "value_dim": None}
    found = attend(lambda i, j: abs(i - j) < 3 or j < 1, q, k, v, scale=0.7, **plain)
    np.testing.assert_allclose(found, want.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-14)
