# `make demo` trains the example, `make test` runs every default check; both set up .venv first where there is none.
# Other settings: make PYTHON=python3.12 ..., make demo ARGS="--steps 50", make test PYTEST_ARGS="-x -k packaging".

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: demo test lint unit doctest slow install clean

demo: $(STAMP)
	$(BIN)/python examples/train_bytes.py $(ARGS)

test: lint unit doctest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Only what `make test` runs by default; tests marked `gpu` run with: pytest -m gpu
unit: $(STAMP)
	$(PYTEST) -m "not slow and not gpu"

# The examples in docstrings and in the pages of docs/ and README.md.
doctest: $(STAMP)
	$(PYTEST) --doctest-modules --doctest-glob='*.md' zfx $(wildcard docs) $(wildcard README.md)

slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu"

install: $(STAMP)

# torch comes first and alone: where a CPU build is on offer it is taken, and the second line keeps whatever is there.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
