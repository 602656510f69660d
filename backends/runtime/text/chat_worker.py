"""Script that renders one chat template in its own process with limits of time and memory.

A template is written by the publisher of the model. jinja2's sandbox blocks files and attributes, but not nested loops
or strings of gigabytes, and constants are computed during parsing. So the process limits itself before it reads the
template: the request is JSON on stdin, the reply JSON on stdout. With the argument --serve it answers any number of
requests, each in a fork that limits itself; a frame is 8 bytes of length, little-endian, and JSON. It imports nothing
of weft.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 1 << 24  # characters of a prompt; the longest contexts are a few million tokens


class GenerationTag(Extension):
    """A jinja2 extension that renders the body of `{% generation %}`, a mark for training."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def new_environment() -> ImmutableSandboxedEnvironment:
    """Return a jinja2 sandbox with the filters, functions and extensions with which Hugging Face renders templates."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def render_template(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """Render `template`; return {"text": prompt}, or {"error": a clause that continues "the chat template …"}."""
    failure = "cannot be parsed"
    try:
        compiled = new_environment().from_string(template)
        failure = "refuses the messages"
        text = compiled.render(variables)
    except MemoryError:
        return {"error": "takes too much memory"}
    except Exception as error:  # also while parsing: constants are computed then, and may divide by zero
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return {"error": f"{failure}: {f'{kind}{error}'[:500]}"}
    if len(text) > LONGEST:
        return {"error": f"makes a prompt of {len(text)} characters, more than {LONGEST}"}
    return {"text": text}


def limit_process(seconds: float, memory: int) -> None:
    """Limit this process to `seconds` of wall-clock and of CPU time and to `memory` bytes; forbid writing files."""
    bounds = [(resource.RLIMIT_CPU, math.ceil(seconds)), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0)]
    for which, most in [*bounds, (resource.RLIMIT_CORE, 0)]:
        with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space
            resource.setrlimit(which, (most, most))
    # A signal that the parent ignores stays ignored across exec.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Read a single request from stdin and write its reply to stdout."""
    sys.stdout.write(answer_request(sys.stdin.buffer.read()))


def answer_request(raw: bytes) -> str:
    """Render the template of the JSON request `raw` in this process, after setting its limits; return JSON."""
    request = json.loads(raw)
    limit_process(request["seconds"], request["memory"])
    return json.dumps(render_template(request["template"], request["variables"]))


def serve_requests(requests: BinaryIO, replies: BinaryIO, answer: Callable[[bytes], str]) -> None:
    """Run `answer` on each frame of `requests`, in a fork, until `requests` ends. For each, write a frame to `replies`
    with the JSON {"status": exit code of the fork, "reply": result of `answer`}."""
    while len(head := requests.read(8)) == 8:
        raw = requests.read(int.from_bytes(head, "little"))
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.close(ours)
                with os.fdopen(theirs, "w", encoding="utf-8") as pipe:
                    pipe.write(answer(raw))
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        reply = json.dumps({"status": os.waitstatus_to_exitcode(status), "reply": text}).encode()
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        # Warm up caches such as the lexer's patterns, so that the forks inherit them.
        new_environment().from_string("{% for a in b %}{{ a.c | trim }}{% endfor %}").render({"b": []})
        serve_requests(sys.stdin.buffer, sys.stdout.buffer, answer_request)
    else:
        main()
