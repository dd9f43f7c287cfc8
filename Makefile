# Everything a person or a machine does with this project. `make help` lists it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test lint train bench faults fuzz soak clean tools

help:  ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.serve  ## Start a real server and play with it; KEEP=1 leaves it running
	KEEP=$(KEEP) $(BIN)/python -m worldserve.demo

tools:  ## What some tests need beside Python (Debian, as root): Prometheus and nginx
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends prometheus nginx-light

test: $(VENV)/.dev  ## All tests, against a real tritonserver and a real object store
	$(BIN)/python -m pytest $(TESTS)

faults: $(VENV)/.dev  ## Break the server in every way we know while 64 people work: 20 minutes
	CTRLCACHE_FAULTS=full timeout -s INT 1200 $(BIN)/python -m pytest tests/faults

soak: $(VENV)/.train  ## Half an hour of 16 people: memory, files and latency over time, as a picture
	$(BIN)/python benchmarks/soak.py

fuzz: $(VENV)/.dev  ## Hunt for what the tests have not thought of; HUNT=100 looks five times as hard
	CTRLCACHE_HUNT=$(or $(HUNT),20) $(BIN)/python -m pytest --timeout=0 -m hypothesis $(TESTS)
	CTRLCACHE_FUZZ=$(or $(REQUESTS),50000) $(BIN)/python -m pytest -s --timeout=0 tests/fuzz/test_server.py

lint: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

train: $(VENV)/.train  ## Data, model, adapter, calibration, evaluation: hours; goes on where it was
	$(BIN)/worldserve data generate
	$(BIN)/worldserve train
	$(BIN)/worldserve train-adapter
	$(BIN)/ctrlcache calibrate model
	$(BIN)/ctrlcache calibrate reuse --data data --suite kitchen --suite inspection --suite edudemo --cases 36
	$(BIN)/worldserve evaluate

bench: $(VENV)/.dev  ## The measurements behind the figures in docs/
	$(BIN)/python benchmarks/perf_analyzer.py

clean:  ## Remove what was installed or made here, but no data and no weights
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache
	rm -f demo/*.png demo/*.gif
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- environments -------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "Python 3.11 is needed (found: $$($(PYTHON) --version 2>&1 || echo none))." >&2; \
	  echo "Debian 12: apt-get install python3.11 python3.11-venv libpython3.11" >&2; \
	  echo "or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: requirements.lock pyproject.toml | $(BIN)/python
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock requirements-semantic.lock $(VENV)/.serve
	$(PIP) -r requirements-dev.lock
	$(PIP) --no-deps -r requirements-semantic.lock
	@touch $@

$(VENV)/.train: requirements-train.lock $(VENV)/.serve
	$(PIP) -r requirements-train.lock
	@touch $@
