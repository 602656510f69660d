"""Presets: published sizes to the parameter, what a token costs, and how quickly their graphs are built."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.frontends import PRESETS, load_source
from weft.ir import ops, verify
from weft.passes.analysis.costs import count_active_parameters, count_parameters, count_state_bytes, find_cache_sizes

from ...sampling import each

every_preset = pytest.mark.parametrize("name", PRESETS)


@every_preset
def test_the_size_is_the_published_one(name: str) -> None:
    found = load_source(name, seed=3)
    assert count_parameters(found.graph) == PRESETS[name].parameters
    assert (found.random_init, found.seed, found.graph.name) == (True, 3, name)
    assert PRESETS[name].about
    verify(found.graph, recipes=True)


def test_preset_sizes_are_the_published_ones() -> None:
    """Written out here a second time: a slip of the pen in the table must not agree with itself."""
    published = {
        "transformer-base": 63_045_632,  # 37 000 · 512 + 6 · (3 150 336 + 4 199 936), without biases of attention
        "gpt2": 124_439_808,
        "gpt3-175b": 174_604_259_328,  # 96 · (12 d² + 13 d) + (50 257 + 2048 + 2) d for d = 12 288
        "bert-base": 109_482_240,
        "all-minilm-l6-v2": 22_713_216,
        "t5-base": 222_903_552,
        "t5-v1.1-base": 247_577_856,
        "switch-base-8": 619_339_008,  # of transformers' class
        "smollm2-135m": 134_515_008,
        "llama2-7b": 6_738_415_616,
        "llama2-70b": 68_976_648_192,
        "llama3.1-8b": 8_030_261_248,
        "llama3.1-70b": 70_553_706_496,
        "llama3.1-405b": 405_853_388_800,
        "mistral-7b": 7_241_732_096,
        "mixtral-8x7b": 46_702_792_704,
        "qwen2.5-3b": 3_085_938_688,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-235b-a22b": 235_093_634_560,
        "deepseek-v3": 671_026_404_352,
        "mamba-130m": 129_135_360,
        "mamba-370m": 371_516_416,
        "mamba-790m": 793_204_224,
        "mamba-1.4b": 1_372_178_432,
        "mamba-2.8b": 2_768_345_600,
    }
    assert {name: preset.parameters for name, preset in PRESETS.items()} == published


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("llama3.1-8b", 8_030_261_248),
        ("mixtral-8x7b", 12_879_925_248),  # published: 12.9 B
        ("qwen3-30b-a3b", 3_353_032_704),  # 3.3 B
        ("qwen3-235b-a22b", 22_190_763_520),  # 22 B
        ("deepseek-v3", 37_552_282_624),  # 37 B
        ("switch-base-8", 222_903_552 + 12 * 8 * 768),  # as T5, and the routers
    ],
)
def test_active_parameters(name: str, active: int) -> None:
    assert count_active_parameters(load_source(name).graph) == active


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("gpt2", 2 * 12 * 768),
        ("bert-base", 0),
        ("llama3.1-405b", 2 * 126 * 8 * 128),
        ("mistral-7b", 2 * 32 * 8 * 128),
        ("deepseek-v3", 576 * 61),  # the latent and the rotary key
        ("t5-base", 2 * 12 * 768),  # of the decoder
        ("mamba-2.8b", 0),
    ],
)
def test_cached_numbers_of_a_token(name: str, numbers: int) -> None:
    assert sum(width for width, _ in find_cache_sizes(load_source(name).graph.nodes)) == numbers


def test_states_have_a_constant_size() -> None:
    assert count_state_bytes(load_source("mamba-130m").graph.nodes, 2) == 24 * 1536 * (16 * 4 + 3 * 2)
    assert count_state_bytes(load_source("gpt2").graph.nodes, 2) == 0


def test_gpt3_alternates_dense_and_banded_layers() -> None:
    windows = [n.attrs["window"] for n in load_source("gpt3-175b").graph.nodes if n.op is ops.attention]
    assert windows == [None, 256] * 48


@pytest.mark.parametrize("name", each(3, ["llama3.1-405b", "qwen3-235b-a22b", "gpt3-175b", "deepseek-v3"]))
def test_large_graphs_are_small(name: str) -> None:
    """A process of its own builds one in less than 5 s of a processor and 500 MB, the interpreter's start included."""
    measure = (
        "import re, time; from weft.frontends import load_source; "
        f"load_source({name!r}); seconds = time.process_time(); "
        # not ru_maxrss, which begins with what the parent had in memory
        "print(seconds, re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", measure], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < 5
    assert kilobytes < 500_000
