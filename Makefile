# Every target makes what it needs, a virtual environment first. PYTHON=python3.12 make test takes another Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard bfc/*.pyx bfc/*.pxd bfc/*.hpp bfc/*.h bfc/*/*.pyx)
TESTED := $(wildcard bfc/*.py bfc/*/*.py tests/*.py tests/*/*.py tests/*/*/*.py tests/emulator/*)

.DEFAULT_GOAL := help
.PHONY: help dev demo test test-gpu test-cuda12 peers check bench bench-gpu lint clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

dev: $(VENV)/built ## make the virtual environment, and build the package into it

demo: $(VENV)/built ## replay the recorded training runs: the main job, in seconds
	$(BIN)/bfc replay bench/traces/unet_buckets.npz --device simulated:26GiB
	@echo
	$(BIN)/bfc replay bench/traces --no-picture

test: $(VENV)/clients ## run the tests: CUDA on an emulated driver, with the libraries that share a pool on top
	$(BIN)/pytest -m "not peers"

test-gpu: $(VENV)/clients ## run the CUDA tests on this machine's GPU
	BFC_TEST_GPU=1 $(BIN)/pytest tests/cuda tests/copy/test_gpu.py

test-cuda12: .venv-cuda12/built ## run the CUDA tests with cuda-bindings 12.9, without the libraries that share a pool
	cd build/cuda12 && ../../.venv-cuda12/bin/pytest --ignore=tests/cuda/integrations tests/cuda tests/test_emulator.py

peers: $(VENV)/built ## compare with the compiled originals (downloads once: TensorFlow's wheel, 260 MB, and three of PyTorch's, 750 MB)
	$(BIN)/pytest -m peers

check: .venv-check/built ## run the tests on a debug build: every invariant after every step
	cd build/check && BFC_DEBUG=2 ../../.venv-check/bin/pytest -m "not peers"

bench: $(VENV)/built ## measure, the compiled originals beside ours (downloads once: TensorFlow's wheel, 260 MB, and PyTorch's, 530 MB)
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.calls
	$(BIN)/python -m bench.opencl
	$(BIN)/python -m bench.copies

bench-gpu: $(VENV)/clients ## measure a cache hit through each library, beside that library's own pool, on a GPU
	$(BIN)/python -m bench.integrations

lint: $(VENV)/linters ## format and lint: ruff, mypy, cython-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint bfc   # which looks for pycodestyle on the path
	$(BIN)/mypy

clean: ## remove what was built; the virtual environments too
	rm -rf build *.egg-info $(VENV) .venv-check .venv-cuda12
	find bfc -name '*.so' -delete

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/built: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[cli,test]'
	@touch $@

$(VENV)/clients: $(VENV)/built
	$(BIN)/python -m pip install --quiet --editable '.[clients]'
	@touch $@

$(VENV)/linters: $(VENV)/built
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@

# Other builds have a copy of the tree each, so that their modules do not come in each other's way.
COPY = rm -rf build/$(1) && mkdir -p build/$(1) \
	&& cp -r bfc bench docs tests CHANGELOG.md LICENSE Makefile README.md pyproject.toml setup.py build/$(1) \
	&& find build/$(1) -name '*.so' -delete

.venv-check/built: $(SOURCES) $(TESTED)
	$(PYTHON) -m venv .venv-check
	$(call COPY,check)
	BFC_DEBUG=2 .venv-check/bin/python -m pip install --quiet --editable 'build/check[cli,test,clients]'
	@touch $@

.venv-cuda12/built: $(SOURCES) $(TESTED)
	$(PYTHON) -m venv .venv-cuda12
	$(call COPY,cuda12)
	.venv-cuda12/bin/python -m pip install --quiet --editable 'build/cuda12[cli,test]' 'cuda-bindings<13'
	@touch $@
