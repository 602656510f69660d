"""Words that are seldom right: templates, statements, pipelines, arguments."""

from __future__ import annotations

# fmt: off
TEMPLATES = (
    "{{ 1/0 }}", "{% break %}", "{% for", "{{ messages", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ x.y.z }}", "{{ raise_exception('no') }}", "{{ messages | tojson }}", "{% include 'x' %}", "{% extends 'y' %}",
    "{{ 'a' % 3 }}", "{{ ''.__class__.__mro__ }}", "{{ messages[99].content }}", "{{ messages | map('x') | list }}",
    "{{ strftime_now(3) }}", "{{ [1][2] }}", "{{ 10 ** 400 }}", "{{ '{:9999}'.format(1) }}",
    "{% set x = namespace() %}{{ x.y + 1 }}", "",
)
STATEMENTS = (
    "exit()", "import sys; sys.exit(0)", "raise SystemExit('x')", "raise BaseException('x')", "raise KeyError(3)",
    "1/0", "import os; os.chdir('/')", "import sys; sys.path.clear()", "import sys; del sys.modules[__name__]",
    "del block", "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E()",
    "raise GeneratorExit", "assert False", "def f(): return f()\nf()", "model = 3", "model = None", "model = [model]",
    "import nothing_of_that_name", "x = (" * 50,
    "class M:\n    def __getattr__(self, n): raise RuntimeError(n)\nmodel = M()", "model = lambda: model",
    "raise StopIteration", "class M:\n    def graph(self, seed, name): return 5\nmodel = M()", "def model(): exit()",
    "raise MemoryError('x' * 9000)", "block = Block(None, None, RMSNorm())", "raise RecursionError",
    "print('\\x1b[31m')", "import warnings; warnings.warn('x')",
)
PLUGINS = (
    "raise BaseException('x')", "raise SystemExit(3)", "raise GeneratorExit", "exit()",
    "class B(BaseException):\n    def __str__(self): raise ValueError\nraise B",
    "raise BaseExceptionGroup('x', [SystemExit(1)])",
    "from weft.ir.registry import Registry\nRegistry('x', 'nothing', 'y').load()", "import weft.nothing",
    "import sys; sys.argv = 3",
    "@weft.op\ndef f(x): return x", "from weft.passes.core.base import Pass\nclass P(Pass): name = 3",
    "from weft.backends.target import TARGETS\nTARGETS.add('ort-cpu', 3)",
    "from weft.backends.target import TARGETS\nTARGETS.add('x', None)",
    "from weft.passes.core.base import Pass\nclass Q(Pass):\n    name = 'dce'",
    "1/0", "raise StopIteration",
    "raise UnicodeDecodeError('a', b'', 0, 1, 'c')",
    "class D(Exception):\n    def __repr__(self): raise SystemExit\n    __str__ = __repr__\nraise D",
    "raise OSError(2, 'no', b'\\xff')", "raise ImportError", "raise ImportError(name=3)", "raise WeftError", "x = 3",
)
PIPELINES = (
    "default", "pack-qkv, pack-gate-up, dce", "mha-to-gqa{kv_heads=1}", "fuse: pack-qkv; cache: kv-cache",
    "default, -dce", "widen-ffn{to=32}", "prune-heads{keep=2}", "cast{to=f16}", "drop-layers{layers=[0]}",
    "simplify, cse, kv-cache",
)
WORDS = (
    "-pack_qkv", "pack_qkv", "-x", "{", "}", "[", "]", "=", ",", ";", ":", '"\\q"', '"x', "9" * 5000, "default", "@x",
    "none", "true", "1e999", "-1", "0", "\x00", "é", "{kv_heads=2}", "[1, [2]]", "a" * 3000, "kv-cache", "[" * 200,
)
NASTY = (
    "", "-", "--", "x" * 3000, "é", "-1", "0", "1e999", "nan", "/dev/null", "/", ".", "..", "~", "~nobody", "a\nb",
)
SOURCES = (
    "llama3.1-8b", "gpt2", "nothing", "org/name", "model.safetensors", "model.onnx", "pytorch_model.bin", "x.gguf",
    "x.weft", "x.py", "x.py:", "x.py:y", "/dev/stdin", "/proc/self/mem", "/proc/self/fd/0", "-", "models--a--b",
    "a/b/c", "./x/y", "é/x",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("--tokens", "--dtype", "--parts", "--json"),
    "opt": ("-p", "-o", "--dtype", "--verify", "--trace", "--list", "-pack_qkv", "--dump-ir"),
    "export": ("--format", "-o", "--dtype", "-p", "--seed"),
    "compile": (
        "-o", "--target", "--dtype", "--max-length", "--keep-blocks", "--tensor-parallel", "--seed", "--prepack",
    ),
    "run": (
        "--ids", "--prompt", "--max-tokens", "--temperature", "--top-k", "--top-p", "--beams", "--device", "--chat",
    ),
    "viz": ("-o", "--depth", "--open", "--theme", "--scale", "--vs"),
    "verify": ("--against", "--prompt", "--tokens", "--json"),
    "eval": ("--against", "--text", "--tokens", "--context"),
    "heal": ("--against", "--text", "-o", "--tokens", "--samples", "--rate", "--context", "--bf16"),
    "gallery": ("-o",),
    "families": (),
    "ops": (),
    "passes": (),
    "presets": (),
    "completion": (),
}
# fmt: on
