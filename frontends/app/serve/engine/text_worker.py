"""Tokenize long texts and try grammars; run with -m, by forks that may take little time and memory (see chat_worker).

Tokenizers hold Python's lock while they work, which takes seconds for a text of megabytes, and a grammar of a few
kilobytes can exhaust the stack of its parser: neither may happen in the process that serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from array import array
from pathlib import Path
from typing import Any

from weft.backends.runtime.text.chat_worker import limit, serve
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .constraints import Constraints

MEMORY = 4 << 30  # bytes of addresses, the interpreter's own and the tokenizer's included
STACK = 1 << 20  # an eighth of what the threads have that use the grammar later


def main(folder: Path, vocab: int, stop_ids: list[int]) -> None:
    """Answer requests until there are no more: {"seconds", "text", "special"} or {"seconds", "grammar"}."""
    tokenizer, constraints = Tokenizer(folder), Constraints(folder, vocab, stop_ids)
    with contextlib.suppress(WeftError):  # that grammars are told of
        _ = constraints.tokenizer

    def answer(raw: bytes) -> str:
        request: dict[str, Any] = parse_json(raw, "a request", values=len(raw))
        limit(request["seconds"], MEMORY)
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        os.nice(10)  # answers that are under way come first
        try:
            if "grammar" in request:
                constraints.guide(request["grammar"])
                return "{}"
            ids = tokenizer.encode(request["text"], request["special"])
            return json.dumps({"ids": array("I", ids).tobytes().hex()})
        except WeftError as error:
            return json.dumps({"error": str(error)})

    serve(sys.stdin.buffer, sys.stdout.buffer, answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *parse_json(sys.argv[2], "the arguments", list))
