"""Seeded changes to values, text and bytes: each takes a `random.Random` and returns something a little wrong."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

NUMBERS: list[Any] = [
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        127,
        255,
        1000,
        65_536,
        1_000_000,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**40,
        2**63 - 1,
        2**63,
        2**64,
    ),
    *(10**30, -(2**63), 0.0, -0.0, 0.5, 1e-300, 1e300, 1e308 * 10, -1e308 * 10, float("nan")),
]
TEXTS = [
    "",
    " ",
    "x",
    "../x",
    "/etc/passwd",
    "a" * 3000,
    "é",
    "\x1b[31m",
    "\x00",
    "1",
    "none",
    "%s{}",
    "\n",
    "\u202e",
    "💥",
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, [1, "x"], {"a": {"b": 1}}]
DEEP = 100_000


def deep_json(rng: random.Random) -> str:
    """JSON whose lists or objects are nested very deep."""
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    depth = rng.choice((90, 120, 1000, DEEP))
    return opening * depth + "1" + closing * depth * rng.randrange(2)


def value(rng: random.Random) -> Any:
    """Anything JSON can hold that is seldom right."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind < 9:
        return copy.deepcopy(rng.choice(OTHERS))
    return [rng.choice(NUMBERS)] * rng.choice((1, 2, 3, 1000))


def near(rng: random.Random, old: Any) -> Any:
    """A value of the type of `old`, or of another one."""
    if rng.random() < 0.5:
        return value(rng)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, -old, old * 1000, float(old), str(old), [old]))
    if isinstance(old, float):
        return rng.choice((old * 2, -old, str(old), [old], int(old) if abs(old) < 1e18 else 0))
    if isinstance(old, str):
        return rng.choice((old.upper(), old + "x", old[: len(old) // 2], [old], {"content": old}, old * 50))
    if isinstance(old, list):
        return rng.choice((old[:-1], old * 2, old[::-1], dict.fromkeys(map(str, old), 1), old[:1], [old]))
    if isinstance(old, dict):
        return rng.choice((list(old), dict(list(old.items())[1:]), {**old, "x": 1}, None))
    return value(rng)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `tree`, with each of its keys."""
    level = [tree]
    while level:
        held = level.pop()
        for key, item in list(held.items() if isinstance(held, dict) else enumerate(held)):
            yield held, key
            if isinstance(item, (dict, list)):
                level.append(item)


def json_tree(rng: random.Random, tree: Any) -> Any:
    """`tree` with one to three values replaced, taken out, renamed, or added."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return value(rng)
        held, key = rng.choice(found[:40] if rng.random() < 0.3 else found)
        what = rng.randrange(10)
        if what < 7:
            held[key] = near(rng, held[key])
        elif what == 7:
            del held[key]
        elif isinstance(held, dict):
            held[rng.choice((*TEXTS, str(key) + "_"))] = held.pop(key) if what == 8 else value(rng)
        else:
            held.insert(key, value(rng))
    return tree


def json_text(rng: random.Random, text: str) -> bytes:
    """The JSON `text`, changed as a tree, or as text."""
    what = rng.randrange(20)
    if what < 14:
        return json.dumps(json_tree(rng, json.loads(text)), indent=rng.choice((None, 1))).encode()
    if what == 14:
        return deep_json(rng).encode()
    if what == 15:  # inside
        spot = rng.choice([m.end() for m in re.finditer(r":\s*", text)] or [0])
        return (text[:spot] + deep_json(rng) + ", " + text[spot:]).encode()
    if what == 16:
        return re.sub(r"\d+", lambda m: "9" * rng.choice((20, 400, 5000)), text, count=1).encode()
    if what == 17:
        return text.replace('"', '"\\ud800', rng.randrange(3)).encode()
    return raw_bytes(rng, text.encode())


def raw_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with bits flipped, cut, doubled, or with foreign bytes in it."""
    what, size = rng.randrange(8), len(data)
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(64)))
    at = rng.randrange(min(size, 2000)) if rng.random() < 0.7 else rng.randrange(size)
    if what < 3:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[min(size - 1, at + rng.randrange(16))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if what == 3:
        return data[:at]
    if what == 4:
        return data + data[: rng.randrange(1, 100)]
    if what == 5:
        return data[:at] + bytes(rng.choice((b"\x00" * 8, b"\xff" * 8, b"\xed\xa0\x80", b"\xff\xfe"))) + data[at:]
    if what == 6:
        return data[:at] + data[at + rng.randrange(1, 32) :]
    return rng.choice((b"", b"\x00", b"\xff" * 100, b"[" * DEEP, b"\x80\x04\x95", b"PK\x03\x04"))


SNIPPETS = (
    *(
        "floordiv(seq, 0)",
        "seq^99999999",
        "2^4000",
        "(" * 5000,
        "[" * 5000,
        '"\\q"',
        "9" * 5000,
        "-" * 3000,
        "seq*" * 900,
    ),
    *(
        "inf",
        "nan",
        "none",
        "true",
        "-1",
        "0",
        "1e999",
        "%x",
        "_",
        "{",
        "}",
        '"',
        "é",
        "\x00",
        "#",
        "f64",
        "bool",
        "q4_0",
    ),
    *("(seq + batch + past + a + b + c)^60", "min(seq, max(1, floordiv(past, 3)))", "scope layers.0", "dtype", "= ="),
    *(
        '{"a": ' + "[" * 200 + "]" * 200 + "}",
        "normal(0.0, 1e400)",
        "concat([], 0)",
        "slice(full(0.0, [2, 2]), 0, 5, 1)",
    ),
)
_WORD = re.compile(r"%?[\w.\-/]+|\"[^\"\n]*\"|\S|\n")


def source_text(rng: random.Random, text: str, snippets: tuple[str, ...] = SNIPPETS) -> str:
    """Text of a language with words replaced, doubled, swapped, or taken out."""
    words = [(m.start(), m.end()) for m in _WORD.finditer(text)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not words:
            return rng.choice(snippets)
        a, b = rng.choice(words)
        c, d = rng.choice(words)
        word, other = text[a:b], text[c:d]
        what = rng.randrange(10)
        if what < 3:
            new = other
        elif what < 6:
            new = rng.choice(snippets)
        elif what == 6:
            new = ""
        elif what == 7:
            new = word + " " + word
        elif re.fullmatch(r"-?\d+", word):
            new = str(rng.choice(NUMBERS))
        else:
            new = word + rng.choice(("x", "0", ".", "-"))
        text = text[:a] + new + text[b:]
        words = [(m.start(), m.end()) for m in _WORD.finditer(text[:20_000])]
    return text
