# Every target makes what it needs, a virtual environment first. PYTHON=python3.12 make test takes another Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard bfc/*.pyx bfc/*.pxd bfc/*.hpp bfc/*.h bfc/*/*.pyx)

.DEFAULT_GOAL := help
.PHONY: help dev demo test peers check bench lint clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

dev: $(VENV)/built ## make the virtual environment, and build the package into it

demo: $(VENV)/built ## replay the recorded training runs: the main job, in seconds
	$(BIN)/bfc replay bench/traces/unet_buckets.npz --device simulated:26GiB
	@echo
	$(BIN)/bfc replay bench/traces --no-picture

test: $(VENV)/built ## run the tests
	$(BIN)/pytest -m "not peers"

peers: $(VENV)/built ## compare with TensorFlow's compiled BFC (downloads its wheel, 260 MB, once)
	$(BIN)/pytest -m peers

check: .venv-check/built ## run the tests on a debug build: every invariant after every step
	cd build/check && ../../.venv-check/bin/pytest -m "not peers"

bench: $(VENV)/built ## measure, TensorFlow's compiled BFC beside ours (downloads its wheel once)
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.calls

lint: $(VENV)/linters ## format and lint: ruff, mypy, cython-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint bfc   # which looks for pycodestyle on the path
	$(BIN)/mypy

clean: ## remove what was built; the virtual environments too
	rm -rf build *.egg-info $(VENV) .venv-check
	find bfc -name '*.so' -delete

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/built: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[cli,test]'
	@touch $@

$(VENV)/linters: $(VENV)/built
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@

# The debug build has a copy of the tree, so that neither build's modules come in the other's way.
.venv-check/built: $(SOURCES) $(wildcard bfc/*.py bfc/*/*.py tests/*.py tests/*/*.py)
	$(PYTHON) -m venv .venv-check
	rm -rf build/check && mkdir -p build/check
	cp -r bfc bench docs tests CHANGELOG.md LICENSE Makefile README.md pyproject.toml setup.py build/check
	find build/check -name '*.so' -delete
	BFC_DEBUG=2 .venv-check/bin/python -m pip install --quiet --editable 'build/check[cli,test]'
	@touch $@
