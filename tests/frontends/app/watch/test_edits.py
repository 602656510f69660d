"""Numbers of architecture files, and files with other numbers."""

from __future__ import annotations

from weft.frontends.app.watch.edits import list_numbers, replace_numbers

CODE = b"""# \xc3\xa4 comment with 7
HEADS = 8
local = Block(Attention(heads=HEADS, kv_heads=2, window=512), GatedMLP(2_048))
model = Decoder(vocab=32_000, dim=-1, layers=[local] * 6, causal=True, eps=1e-5)
"""


def test_numbers_have_the_names_of_variables_arguments_and_classes() -> None:
    numbers = list_numbers(CODE)
    assert [(n.name, n.value, n.line) for n in numbers] == [
        ("HEADS", 8, 2),
        ("kv_heads", 2, 3),
        ("window", 512, 3),
        ("GatedMLP", 2048, 3),
        ("vocab", 32000, 4),
        ("dim", 1, 4),
        ("layers", 6, 4),
    ]
    assert numbers[2].range == [128, 256, 384, 512, 768, 1024, 2048]
    assert list_numbers(b"model = (") == []


def test_files_with_other_numbers_differ_in_them_only() -> None:
    changed = replace_numbers(CODE, {0: 4, 3: 96, 99: 1})
    assert changed == CODE.replace(b"HEADS = 8", b"HEADS = 4").replace(b"2_048", b"96")
