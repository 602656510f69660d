"""A process (python -m) that tokenizes long strings and compiles grammars, in forks with limits of time and memory.

Tokenizers hold Python's lock while they work, for seconds on megabytes of text, and a grammar of a few kilobytes can
exhaust the stack of its parser: neither may happen in the process that serves. See chat_worker.
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

from weft.backends.runtime.text.chat_worker import limit_process, serve_requests
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .constraints import Constraints

MEMORY = 4 << 30  # bytes of address space, including the interpreter and the tokenizer
STACK = 1 << 20  # an eighth of the stack of the threads that later use the grammar


def main(folder: Path, vocab: int, stop_ids: list[int]) -> None:
    """Process JSON requests on stdin until it ends: {"seconds", "text", "special"} or {"seconds", "grammar"}."""
    tokenizer, constraints = Tokenizer(folder), Constraints(folder, vocab, stop_ids)
    with contextlib.suppress(WeftError):  # the replies to grammars report the error
        _ = constraints.tokenizer

    def answer(raw: bytes) -> str:
        request: dict[str, Any] = parse_json(raw, "a request", values=len(raw))
        limit_process(request["seconds"], MEMORY)
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        os.nice(10)  # running answers have priority
        try:
            if "grammar" in request:
                constraints.build_guide(request["grammar"])
                return "{}"
            ids = tokenizer.encode(request["text"], request["special"])
            return json.dumps({"ids": array("I", ids).tobytes().hex()})
        except WeftError as error:
            return json.dumps({"error": str(error)})

    serve_requests(sys.stdin.buffer, sys.stdout.buffer, answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *parse_json(sys.argv[2], "the arguments", list))
