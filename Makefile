# An empty machine with Python >= 3.11 and pip is enough for every target. Once the stamps below are newer than what they
# depend on, nothing is installed or fetched again and no network is needed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SETUP := .venv/.setup
RUNTIME := .venv/.runtime
DOCS := .venv/.docs
ENGINES := .venv/.engines
# The first that an engine pins, the last, and the newest: folders for transformers run with each, and with the pinned one.
VERSIONS := 5.19.0 5.20.2 5.24.0
TRANSFORMERS := $(VERSIONS:%=build/transformers/%/.unpacked)
OTHERS := build/optimum/.unpacked build/node/.unpacked
# Python compiles a module to bytecode when it is first imported: faster than all of them here, one after the other.
HASHED := --no-compile --require-hashes --no-deps --only-binary :all:
ITSELF := --no-deps --no-build-isolation -e .
CACHE := .cache/weights
SMOLLM2 := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := $(CACHE)/all-MiniLM-L6-v2
SOURCES := src ir passes backends frontends tests
JOBS ?= 2
INPUTS ?= 20000
SEED ?= 0
PROMPT ?= What is the capital of France? Answer in one sentence.

# Where it is set, every process would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup weights test test-all test-engines kills fuzz stubs lint style format demo docs licences lock newest bench clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 10

setup: $(SETUP)  ## a virtual environment in .venv with weft and all its tools

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "weft needs Python 3.11 or newer: install it, or name it with 'make PYTHON=/path/to/python'"; exit 1; }
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }

# Wheels by their hashes, then PyTorch, whose builds differ from index to index, by its version, then weft itself.
$(SETUP): pyproject.toml constraints.txt requirements/test.txt | $(BIN)/python
	$(BIN)/python -m pip install $(HASHED) -r requirements/test.txt
	$(BIN)/python -m pip install --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install $(ITSELF)
	@touch $(RUNTIME) $@

# What compiling and running need: no PyTorch.
$(RUNTIME): pyproject.toml constraints.txt requirements/demo.txt | $(BIN)/python
	$(BIN)/python -m pip install $(HASHED) -r requirements/demo.txt
	$(BIN)/python -m pip install $(ITSELF)
	@touch $@

$(DOCS): constraints.txt requirements/docs.txt | $(BIN)/python
	$(BIN)/python -m pip install $(HASHED) -r requirements/docs.txt
	@touch $@

# Three packages that lm-eval asks for are published as sources only.
$(ENGINES): $(SETUP) constraints.txt requirements/engines.txt
	$(BIN)/python -m pip install --no-compile --require-hashes --no-deps --prefer-binary --no-build-isolation -r requirements/engines.txt
	@touch $@

$(TRANSFORMERS): build/transformers/%/.unpacked: requirements/transformers.txt | $(BIN)/python
	@mkdir -p $(@D)
	sed -n '/^transformers==$* /,/[^\\]$$/p' $< > $(@D)/requirements.txt
	$(BIN)/python -m pip install --quiet $(HASHED) --upgrade --target $(@D) -r $(@D)/requirements.txt
	@touch $@

build/optimum/.unpacked: requirements/optimum.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(HASHED) --upgrade --target $(@D) -r $<
	@touch $@

# Without the scripts of packages: the binaries for Linux are in them.
build/node/.unpacked: backends/onnx/web/__init__.py
	@command -v npm > /dev/null || { echo "the tests of folders for the web need Node 20 or newer with npm: install it"; exit 1; }
	npm install --prefix $(@D) --no-package-lock --ignore-scripts --no-audit --no-fund \
		@huggingface/transformers@$$(sed -n 's/^VERSION = "\(.*\)".*/\1/p' $<)
	@touch $@

# What the tests of pages look at them with; CHROMIUM names another one than is found.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome || echo /usr/bin/chromium)

$(CHROMIUM):
	@test "$$(id -u)" = 0 && command -v apt-get > /dev/null || \
		{ echo "the tests of pages need Chromium: install it, or name it with 'make CHROMIUM=/path/to/chromium'"; exit 1; }
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium

weights: $(SMOLLM2) $(MINILM)  ## the two real models of the tests and the demo, into .cache/weights

$(SMOLLM2) $(MINILM): | $(BIN)/python
	$(BIN)/python tests/weights.py $(@F) $(CACHE)

# `make test ISA=avx2` runs them as on a CPU without AVX-512, as far as PyTorch goes: oneDNN refuses to pack bf16 weights.
# Types are checked by one of the tests, beside others on the other core.
test: $(SETUP) $(SMOLLM2) $(MINILM) $(CHROMIUM) style  ## every check: lint, types, tests
	$(if $(ISA),ONEDNN_MAX_CPU_ISA=$(ISA) ATEN_CPU_CAPABILITY=$(ISA)) CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# What `make test` samples, because all of it takes minutes: tests that ask for WEFT_TESTS.
test-all: export WEFT_TESTS := all
test-all: test  ## the same, and every pass checked on every graph that it rewrites

test-engines: export WEFT_ENGINES := all
test-engines: $(ENGINES) $(TRANSFORMERS) $(OTHERS) $(SMOLLM2) $(MINILM) $(CHROMIUM)  ## folders for transformers in the tools that take them, and tests marked long
	CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

kills: $(SETUP)  ## commands killed at random moments: every result must be whole
	$(BIN)/python -m tests.fuzz.kills --out benchmarks/results/kills.json

fuzz: $(SETUP)  ## INPUTS mutated files and arguments by SEED: none may end in a traceback, a hang or in too much memory
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED) --jobs $(JOBS) --out benchmarks/results/fuzz.json

stubs: $(SETUP)  ## the types of the public names, written from the code
	$(BIN)/python -m tests.stubs

lint: style  ## style and types; counts of unclear words, lines of rooms with their budgets, modules without a test file
	$(BIN)/mypy
	$(BIN)/python -m tests.style.words
	$(BIN)/python -m tests.style.lines
	$(BIN)/python -m tests.style.paths

style: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(SETUP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(RUNTIME) $(SMOLLM2)  ## compile SmolLM2 and let it answer PROMPT
	$(BIN)/weft compile $(SMOLLM2) -o build/smollm2
	$(BIN)/weft run build/smollm2 --chat --prompt "$(PROMPT)"

docs: $(DOCS)  ## the pages and the API reference as a site, into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

licences: $(SETUP) $(DOCS) $(ENGINES)  ## docs/licences.md, from the metadata of what is installed
	$(BIN)/python -m tests.licences

# After a change of constraints.txt or of dependencies: every wheel of the pinned versions, with its hash.
UV := build/uv/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' --no-emit-package torch --no-emit-package httpx2-jsfetch \
	--override requirements/overrides.txt -c constraints.txt

lock: | $(BIN)/python  ## the hashes of the pinned versions, into requirements/
	$(BIN)/python -m pip install --quiet --upgrade --target build/uv uv==0.13.9
	$(UV) --python-version 3.11 pyproject.toml requirements/demo.in --extra cpu -o requirements/demo.txt
	$(UV) --python-version 3.11 pyproject.toml requirements/test.in --extra cpu --extra hf --extra serve --extra dev -o requirements/test.txt
	$(UV) --python-version 3.11 pyproject.toml --extra hf --extra engines -o requirements/engines.txt
	$(UV) --python-version 3.11.5 pyproject.toml --extra docs -o requirements/docs.txt
	for version in $(VERSIONS); do echo transformers==$$version | \
		build/uv/bin/uv pip compile --quiet --no-header --no-deps --generate-hashes --no-annotate - || exit 1; done > requirements/transformers.txt
	build/uv/bin/uv pip compile --quiet --no-header --no-deps --generate-hashes --no-annotate requirements/optimum.in -o requirements/optimum.txt

# Other versions than the pinned ones: those that a newcomer's pip takes. Only PyTorch stays, for its size.
NEWEST := build/newest
newest: export WEFT_ENGINES := all
newest: $(SMOLLM2) $(MINILM) $(CHROMIUM) $(TRANSFORMERS) $(OTHERS)  ## the tests on the newest versions of all dependencies; takes ARGS
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --upgrade --upgrade-strategy eager -e '.[cpu,hf,serve,dev,engines]' \
		"$$(grep '^torch==' constraints.txt)"
	CHROMIUM=$(CHROMIUM) $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

bench: $(SETUP) $(SMOLLM2)  ## the speed and memory comparisons, minutes each
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:  ## all that was built; .venv and downloaded weights stay
	rm -rf build dist src/weft.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
