# `make demo` and `make test` need Python 3.11 or newer and a package index; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLER ?= $(BIN)/pip

# torch has two builds for Linux: the package index has `cuda`, for NVIDIA GPUs; `cpu` is a twelfth of its size.
# `make test TORCH=cpu` or `TORCH=cuda` installs that one. Without TORCH the installed build stays, and a new .venv gets
# the one that suits the machine. Elsewhere the index has `cpu` only.
BUILDS := $(if $(filter Linux,$(shell uname -s)),cpu cuda,cpu)
GPU = $(shell ls /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so 2>/dev/null || nvidia-smi -L 2>/dev/null | grep ^GPU)
torch := $(shell grep ^torch== constraints.txt)
INSTALLED := $(shell cat .venv/test 2>/dev/null)
BUILD = $(or $(TORCH),$(INSTALLED),$(if $(and $(filter cuda,$(BUILDS)),$(GPU)),cuda,cpu))

.PHONY: demo serve test test-thorough test-all test-nightly lint fuzz bench docs docs-serve check-install another-build clean

demo: .venv/base
	$(BIN)/minipaged demo

# An OpenAI-compatible server at http://127.0.0.1:8000; other options as in make serve ARGS="--port 9000"
serve: .venv/serve
	$(BIN)/minipaged serve $(ARGS)

# *_NUM_THREADS: two test processes share two cores; with two threads each, the threads would mostly wait for each other.
# MALLOC_MMAP_THRESHOLD_: freed weights go back to the system (glibc keeps smaller pieces). PYTHONDONTWRITEBYTECODE=:
# bytecode is kept, or hundreds of processes would compile it again (pytest's alone takes 5 s).
PYTEST = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1048576 $(BIN)/python -m pytest -n 2 --dist worksteal
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

test: .venv/test
	$(PYTEST) -m 'not thorough'

# The tests that `make test` leaves out (of many like cases, a sample), and again the tests with random examples: five
# times as many. Of numbered examples, only the rest.
test-thorough: .venv/test .venv/ray
	$(PYTEST) -m 'thorough or scaled or hypothesis' --hypothesis-profile thorough --hypothesis-seed $(SEED)

test-all: test test-thorough

test-nightly: .venv/test .venv/ray
	$(PYTEST) --hypothesis-profile nightly --hypothesis-seed $(SEED)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: .venv/test
	$(BIN)/python -m tests.fuzz --workloads 100000

bench: .venv/test
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.fast

docs: .venv/test
	$(BIN)/python -m docs.build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "minipaged needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/base: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALLER) install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/serve: .venv/base
	$(INSTALLER) install --quiet --constraint constraints.txt --editable '.[serve]'
	touch $@

.venv/test: pyproject.toml constraints.txt $(if $(filter-out $(INSTALLED),$(BUILD)),another-build) | .venv/bin/python
	$(if $(filter-out $(BUILDS),$(BUILD))$(word 2,$(BUILD)),$(error TORCH=$(BUILD) is no build of torch here; there is: $(BUILDS)))
	$(if $(filter cuda,$(BUILDS)),$(install_torch_$(BUILD)))
	$(INSTALLER) install --quiet --constraint constraints.txt --editable '.[test]'
	echo $(BUILD) >$@
	touch .venv/base .venv/serve

# PyTorch's own index has the build for CPUs. Nothing but torch is looked for there; --retries: it may be out of reach.
define install_torch_cpu
@echo "Installing torch for CPUs (0.2 GB); for NVIDIA GPUs (2.5 GB): make test TORCH=cuda"
@$(BIN)/pip install --quiet --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu $(torch)+cpu || { \
	echo "torch for CPUs was not found; it is at https://download.pytorch.org/whl/cpu. If that is out of reach here, either" \
	  "get its wheel into a folder, and PIP_FIND_LINKS=FOLDER make test, or take the one for GPUs (2.5 GB), which also runs" \
	  "without one: make test TORCH=cuda"; exit 1; }
endef

# Ray is large, and a few thorough tests alone need it.
.venv/ray: .venv/test
	$(INSTALLER) install --quiet --constraint constraints.txt --editable '.[ray]'
	touch $@

# `===`: `==` would be content with the build for CPUs.
define install_torch_cuda
@echo "Installing torch for NVIDIA GPUs (2.5 GB); for CPUs (0.2 GB): make test TORCH=cpu"
@$(BIN)/pip install --quiet --constraint constraints.txt $(subst ==,===,$(torch))
endef

# From the package index alone, whatever this machine's settings are: do the pinned versions fit together everywhere?
check-install: build/check-install
	build/check-install/bin/python .ci/check_install.py

build/check-install: constraints.txt
	$(PYTHON) -m venv --clear $@
	$@/bin/pip install --quiet --constraint constraints.txt pip uv
	touch $@

clean:
	rm -rf .venv build site *.egg-info
