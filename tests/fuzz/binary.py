"""Safetensors and GGUF files taken apart, changed in one part, and put together again."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass, field
from typing import Any

from . import mutations

# -- safetensors


def safetensors(rng: random.Random, data: bytes) -> bytes:
    """The file `data` with a header that is wrong somewhere; or any bytes changed."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    what, names = rng.randrange(12), [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    if what == 0:  # one over the other
        entry["data_offsets"] = header[other]["data_offsets"]
        entry["shape"] = header[other]["shape"]
    elif what == 1:  # shifted
        by = rng.choice((1, -1, 4, -4, 8, 64, 10**6))
        entry["data_offsets"] = [n + by for n in entry["data_offsets"]]
    elif what == 2:
        entry["data_offsets"] = rng.choice(([0, 0], entry["data_offsets"][::-1], [mutations.value(rng)] * 2, [0]))
    elif what == 3:
        entry[rng.choice(list(entry))] = mutations.value(rng)
    elif what == 4:
        entry["shape"] = rng.choice(([], [0], [1] * 100, entry["shape"][::-1], [*entry["shape"], 1], [2**62, 4]))
    elif what == 5:
        entry["dtype"] = rng.choice(("F64", "F16", "BF16", "I8", "F4", "Q4", "f32", "BOOL", ""))
    elif what == 6:
        header = mutations.json_tree(rng, header)
    elif what == 7:  # the same key twice
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}}}"
        return _with_header(text.encode(), body)
    elif what == 8:
        body = rng.choice((body[:-1], body + b"\0", body[: len(body) // 2], body + body, b""))
    elif what == 9:
        return _with_header(mutations.json_text(rng, json.dumps(header)), body)
    elif what == 10:
        return rng.choice((0, 1, length - 1, length + 1, 2**63, 10**8 + 1, len(data))).to_bytes(8, "little") + data[8:]
    else:
        return mutations.raw_bytes(rng, data)
    return _with_header(json.dumps(header).encode(), body)


def _with_header(text: bytes, body: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + body


# -- GGUF

_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@dataclass
class GGUF:
    """The parts of a GGUF file: values as (type, value), arrays as (element type, list)."""

    version: int
    keys: list[tuple[bytes, int, Any]] = field(default_factory=list)
    tensors: list[tuple[bytes, list[int], int, int]] = field(default_factory=list)  # name, dims, type, offset
    data: bytes = b""


def parse_gguf(raw: bytes) -> GGUF:
    """The parts of a sound file."""
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        (found,) = struct.unpack_from("<" + code, raw, at)
        at += struct.calcsize("<" + code)
        return found

    def text() -> bytes:
        nonlocal at
        size = take("Q")
        at += size
        return raw[at - size : at]

    def item(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            inner, count = take("I"), take("Q")
            return inner, [item(inner) for _ in range(count)]
        return take(_CODES[kind])

    found = GGUF(take("I"))
    tensors, keys = take("Q"), take("Q")
    for _ in range(keys):
        name, kind = text(), take("I")
        found.keys.append((name, kind, item(kind)))
    for _ in range(tensors):
        name, rank = text(), take("I")
        found.tensors.append((name, [take("Q") for _ in range(rank)], take("I"), take("Q")))
    found.data = raw[-(-at // 32) * 32 :]
    return found


def write_gguf(parts: GGUF, counts: tuple[int, int] | None = None) -> bytes:
    """The file of `parts`; `counts` of tensors and keys where these should lie."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def item(kind: int, value: Any) -> bytes:
        if kind == _STRING:
            return text(value)
        if kind == _ARRAY:
            inner, items = value
            return struct.pack("<IQ", inner, len(items)) + b"".join(item(inner, i) for i in items)
        return struct.pack("<" + _CODES[kind], value)

    tensors, keys = counts or (len(parts.tensors), len(parts.keys))
    out = b"GGUF" + struct.pack("<IQQ", parts.version, tensors, keys)
    for name, kind, value in parts.keys:
        out += text(name) + struct.pack("<I", kind) + item(kind, value)
    for name, dims, kind, offset in parts.tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
    return out + b"\0" * (-len(out) % 32) + parts.data


def gguf(rng: random.Random, data: bytes) -> tuple[bytes, bool]:
    """The file `data` with one part wrong; and whether two tensors share bytes, or lie elsewhere than they must."""
    parts, what = parse_gguf(data), rng.randrange(14)
    i = rng.randrange(len(parts.tensors))
    name, dims, kind, offset = parts.tensors[i]
    if what < 5:
        k = rng.randrange(len(parts.keys))
        parts.keys[k] = (parts.keys[k][0], *gguf_value(rng, *parts.keys[k][1:]))
    elif what == 5:
        k = rng.randrange(len(parts.keys))
        parts.keys += [parts.keys[k]] * rng.randrange(2)
        del parts.keys[k]
    elif what == 6:
        new = rng.choice((0, parts.tensors[i - 1][3], offset + 32, offset + 64, max(0, offset - 32)))
        parts.tensors[i] = (name, dims, kind, new)
        return write_gguf(parts), new != offset
    elif what == 7:
        parts.tensors[i] = (name, dims, kind, rng.choice((offset + 1, 2**63, 2**64 - 32, 10**9)))
        return write_gguf(parts), True
    elif what == 8:
        wrong = rng.choice(([*dims, 1], dims[::-1], [0], [2**62, 4], [], [1] * 5, [dims[0] * 2, *dims[1:]]))
        parts.tensors[i] = (name, wrong, kind, offset)
    elif what == 9:
        parts.tensors[i] = (name, dims, rng.choice((1, 2, 8, 12, 24, 30, 99)), offset)
    elif what == 10:
        parts.tensors.append((name, dims, kind, offset))
        return write_gguf(parts), True
    elif what == 11:
        parts.tensors[i] = (rng.choice((b"", b"\xff\xfe", b"x" * 70_000, b"blk.99.attn_q.weight")), dims, kind, offset)
    elif what == 12:
        counts = rng.choice(((2**40, len(parts.keys)), (len(parts.tensors), 2**40), (0, 0), (1, len(parts.keys))))
        return write_gguf(parts, counts), False
    else:
        return mutations.raw_bytes(rng, data), False
    return write_gguf(parts), False


_LIMITS = {"B": 2**8 - 1, "b": -(2**7), "H": 2**16 - 1, "h": -(2**15), "I": 2**32 - 1, "i": -(2**31), "Q": 2**64 - 1}


def gguf_value(rng: random.Random, kind: int, value: Any) -> tuple[int, Any]:
    """Another value of type `kind`, or a value of another type."""
    what = rng.randrange(5)
    if what < 3 and kind in _CODES:
        code = _CODES[kind]
        if code in "fd":
            return kind, rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
        return kind, rng.choice((0, 1, 2, 3, _LIMITS.get(code, 1))) if code != "?" else not value
    if what < 3 and kind == _STRING:
        return kind, rng.choice((b"", b"x", b"\xff", value * 2, b"llama", b"bert", b"a" * 5000))
    if what < 3:
        inner, items = value
        return kind, (inner, rng.choice((items[:-1], items * 2, items[::-1], [])))
    other = rng.choice(
        (
            *((4, 2**32 - 1), (4, 1), (5, -1), (6, 0.5), (7, True), (10, 2**64 - 1), (_STRING, b"x"), (_STRING, b"")),
            *(
                (_ARRAY, (4, [1, 2, 3])),
                (_ARRAY, (_STRING, [b"a", b"b"])),
                (_ARRAY, (_ARRAY, [(4, [1])])),
                (_ARRAY, (6, [])),
            ),
        )
    )
    return other
