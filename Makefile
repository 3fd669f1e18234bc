# make setup   make .venv and install everything into it
# make demo    serve the carried checkpoint with three expert servers, and kill one
# make test    lint, types and every test, side by side

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPUTING := tests/benchmarks tests/models tests/ops tests/protocol
# several processes share few cores: OpenMP threads that spin would starve each other
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TRITON_INTERPRET ?= 1
# pip compiles nothing: most modules are never imported, the others are compiled once and kept
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test lint computing serving clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints-cpu.txt setuptools torch triton
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints-cpu.txt --no-build-isolation -e '.[test]'
	touch $@

demo: setup
	$(BIN)/torch-eaas demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(MAKE) --jobs=2 computing serving

# two lanes that take as long, a core for each: what mostly computes, and what mostly waits
computing: lint
	$(BIN)/pytest -p no:cacheprovider $(COMPUTING)

serving: setup
	$(BIN)/pytest -p no:cacheprovider $(COMPUTING:%=--ignore=%)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
