# An empty machine with Python >= 3.11 and pip is enough for every target. Once the stamps below are newer than what they
# depend on, nothing is installed or fetched again and no network is needed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SETUP := .venv/.setup
RUNTIME := .venv/.runtime
CACHE := .cache/weights
SMOLLM2 := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := $(CACHE)/all-MiniLM-L6-v2
SOURCES := src ir passes backends frontends tests
JOBS ?= 2
PROMPT ?= What is the capital of France? Answer in one sentence.

.PHONY: help setup weights test stubs lint format demo bench clean
.DELETE_ON_ERROR:

help:  ## what there is to make
	@sed -nE 's/^([a-z]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 10

setup: $(SETUP)  ## a virtual environment in .venv with weft and all its tools

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "weft needs Python 3.11 or newer: install it, or name it with 'make PYTHON=/path/to/python'"; exit 1; }
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }

$(SETUP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[cpu,hf,torch,dev]'
	@touch $(RUNTIME) $@

# What compiling and running need: no PyTorch.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[cpu]'
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

test: $(SETUP) $(SMOLLM2) $(MINILM) $(CHROMIUM) lint  ## every check: lint, types, tests
	CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

stubs: $(SETUP)  ## the types of the public names, written from the code
	$(BIN)/python -m tests.stubs

lint: $(SETUP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(SETUP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(RUNTIME) $(SMOLLM2)  ## compile SmolLM2 and let it answer PROMPT
	$(BIN)/weft compile $(SMOLLM2) -o build/smollm2
	$(BIN)/weft run build/smollm2 --chat --prompt "$(PROMPT)"

bench: $(SETUP) $(SMOLLM2)  ## the speed and memory comparisons, minutes each
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:  ## all that was built; .venv and downloaded weights stay
	rm -rf build dist src/weft.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
