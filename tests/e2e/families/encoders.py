"""Encoders."""

from __future__ import annotations

from .row import Row
from .sizes import COMMON

ROWS = {
    "bert": Row("BertModel", COMMON | {"type_vocab_size": 2, "hidden_act": "gelu"}),
    "roberta": Row("RobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": Row("XLMRobertaModel", COMMON | {"type_vocab_size": 1, "pad_token_id": 1}),
    "albert": Row("AlbertModel", COMMON | {"type_vocab_size": 2, "embedding_size": 24}),
    "albert-groups": Row(
        "AlbertModel",
        COMMON | {"type_vocab_size": 2, "embedding_size": 64, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
}
