# One command runs the demo, one runs the tests. Both set themselves up; neither needs the other first.
#   make demo | test | test-all | test-torch | test-clients | test-trackers | test-xla | test-ray | test-processors | test-mutations | check | bench | bench-scaling | bench-peer | gpu | docs | clean
#   make demo TORCH=torch==2.9.0      another torch      make demo PYTHON=python3.12   another Python
TORCH  ?= torch==2.13.0
# The versions that are supported, each tested in an environment of its own by `make test-torch`.
NEWEST := $(patsubst torch==%,%,$(shell cat tests/support/requirements-newest.txt))
TORCHES ?= 2.6 2.8 2.10 2.13 $(NEWEST)
PYTHON ?= python3
VENV   := .venv
PEER   := .venv-peer
BIN    := $(VENV)/bin
PIP    := -m pip --disable-pip-version-check --quiet
ARGS   ?=
# Of the tests: workers that share them, three more than cores since many tests wait; threads of each process.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 3)
THREADS ?= 1
# Where Python may not write bytecode, every run would rewrite the assertions of all tests, 7 s of CPU per worker.
export PYTHONDONTWRITEBYTECODE =
# A worker that crashes is not replaced: pytest-xdist 3.8 then ends without the list of failures.
WORKERS_PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --max-worker-restart 0
PYTEST = OMP_NUM_THREADS=$(THREADS) $(WORKERS_PYTEST)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-reduced test-torch test-newest test-clients record-clients test-trackers test-xla test-ray test-mutations test-processors test-coverage check types-of-package calls-of-others format bench bench-scaling bench-peer gpu docs clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch goes in first and is then pinned by a constraints file: anything installed later that asks for
# "torch" gets this one, never several GB of another build.
$(VENV)/constraints.txt:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "[1/2] a virtual environment in $(VENV) with $(TORCH)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) install "$(TORCH)" numpy
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(VENV)/ready-%: $(VENV)/constraints.txt pyproject.toml
	@echo "[2/2] accelerate[$*]"
	@$(BIN)/python $(PIP) install -c $(VENV)/constraints.txt -e '.[$*]'
	@# transformers imports torchao where it is installed, and with an old torch it cannot be imported.
	@[ $* != test ] || $(BIN)/python -c 'import torchao.quantization' 2> /dev/null || \
	    $(BIN)/python -m pip uninstall -q -y torchao
	@touch $@

.PRECIOUS: $(VENV)/ready-%

demo: $(VENV)/ready-examples  ## train on real data with two processes
	$(BIN)/accelerate launch --num_processes 2 --record runs/digits examples/digits.py $(ARGS)
	$(BIN)/accelerate report runs/digits --output runs/digits/report.html

$(VENV)/system-packages: tests/support/system_packages.sh $(VENV)/constraints.txt
	@sh $<
	@touch $@

test: $(VENV)/ready-test $(VENV)/system-packages  ## the test suite
	$(PYTEST) $(ARGS)

test-all: $(VENV)/ready-test $(VENV)/system-packages  ## with more examples and longer trainings (tests/README.md)
	TESTS_ALL=1 $(PYTEST) $(ARGS)

test-reduced: $(VENV)/ready-test  ## the part of it that depends most on torch
	$(PYTEST) $(shell cat tests/support/reduced_suite.txt) $(ARGS)

# make test-torch TORCHES="2.6 2.15"; make test-torch TORCHES=2.13 PYTHON=python3.12
VENV_TORCH = .venv-torch$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
test-torch:  ## that part with each supported version of torch, in turn
	@for version in $(TORCHES); do \
	    echo "--- torch $$version"; \
	    $(MAKE) --no-print-directory test-reduced VENV=$(VENV_TORCH)-$$version TORCH=torch==$$version \
	        || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed with torch:$$failed"; exit 1; }

test-newest:  ## that part with the newest torch alone
	@$(MAKE) --no-print-directory test-torch TORCHES=$(NEWEST)

# Programs of other people, with this package in place of the public one. The second environment has the public one.
CLIENTS = .venv-clients
CLIENTS_PEER = .venv-clients-peer
$(CLIENTS)/constraints.txt $(CLIENTS_PEER)/constraints.txt:
	@echo "an environment in $(@D) with $(TORCH) and the programs of tests/clients/adopters.txt"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP) install "$(TORCH)" numpy
	@$(@D)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(CLIENTS)/ready: $(CLIENTS)/constraints.txt tests/clients/adopters.txt pyproject.toml
	@$(CLIENTS)/bin/python $(PIP) install -c $< -r tests/clients/adopters.txt -e '.[remote]' pytest pytest-timeout
	@touch $@

$(CLIENTS_PEER)/ready: $(CLIENTS_PEER)/constraints.txt tests/clients/adopters.txt
	@$(CLIENTS_PEER)/bin/python $(PIP) install -c $< -r tests/clients/adopters.txt accelerate==1.15.0
	@touch $@

test-clients: $(CLIENTS)/ready  ## programs that use accelerate, against numbers recorded under 1.15
	TESTS_ALL=1 OMP_NUM_THREADS=$(THREADS) $(CLIENTS)/bin/python -m pytest tests/clients/test_adopters.py tests/clients/test_checkouts.py $(ARGS)

record-clients: $(CLIENTS)/ready $(CLIENTS_PEER)/ready  ## record these numbers anew, under the public package
	$(CLIENTS)/bin/python -m tests.clients.record adopters adopters_trl

# The libraries behind trackers, offline; tests/clients/trackers.txt names their versions.
TRACKERS = .venv-trackers
$(TRACKERS)/constraints.txt:
	@echo "an environment in $(TRACKERS) with $(TORCH) and the libraries of tests/clients/trackers.txt"
	@$(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python $(PIP) install "$(TORCH)" numpy
	@$(TRACKERS)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(TRACKERS)/ready: $(TRACKERS)/constraints.txt tests/clients/trackers.txt pyproject.toml
	@$(TRACKERS)/bin/python $(PIP) install -c $< -r tests/clients/trackers.txt -e '.[remote]' pytest pytest-timeout
	@touch $@

test-trackers: $(TRACKERS)/ready  ## every tracker with its library, offline, read back from its files
	TESTS_ALL_TRACKERS=1 OMP_NUM_THREADS=$(THREADS) $(TRACKERS)/bin/python -m pytest tests/clients/test_trackers.py tests/null/test_track_media.py $(ARGS)

# PyTorch/XLA on its client for CPUs. It takes exactly the torch that it was built for, which on PyPI is the build
# for CUDA: 7 GB in all. A local build for CPUs of that version does as well (XLA_TORCH=...).
XLA = .venv-xla
XLA_TORCH ?= torch==2.9.0
$(XLA)/constraints.txt: tests/xla/requirements.txt
	@echo "an environment in $(XLA) with $(XLA_TORCH) and PyTorch/XLA"
	@$(PYTHON) -m venv $(XLA)
	@$(XLA)/bin/python $(PIP) install "$(XLA_TORCH)" numpy
	@$(XLA)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(XLA)/ready: $(XLA)/constraints.txt tests/xla/requirements.txt pyproject.toml
	@$(XLA)/bin/python $(PIP) install -c $< -r tests/xla/requirements.txt -e . pytest pytest-timeout
	@touch $@

test-xla: $(XLA)/ready  ## training on PyTorch/XLA, on its client for CPUs
	OMP_NUM_THREADS=$(THREADS) $(XLA)/bin/python -m pytest tests/xla $(ARGS)

# Ray with two raylets on this machine, and the clients of Kubernetes and Kubeflow.
RAY = .venv-ray
$(RAY)/constraints.txt: tests/ray/requirements.txt
	@echo "an environment in $(RAY) with $(TORCH) and Ray"
	@$(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python $(PIP) install "$(TORCH)" numpy
	@$(RAY)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(RAY)/ready: $(RAY)/constraints.txt tests/ray/requirements.txt pyproject.toml
	@$(RAY)/bin/python $(PIP) install -c $< -r tests/ray/requirements.txt -e . pytest pytest-timeout
	@touch $@

test-ray: $(RAY)/ready  ## jobs on Ray, on two raylets of this machine; manifests, read by the clients of Kubernetes and SkyPilot
	OMP_NUM_THREADS=$(THREADS) $(RAY)/bin/python -m pytest tests/ray tests/null/test_manifests.py $(ARGS)

test-mutations: $(VENV)/ready-test  ## do the tests find mistakes in the source?
	$(BIN)/python -m tests.support.mutations $(ARGS)

test-processors: $(VENV)/ready-test $(VENV)/system-packages  ## what computes, as other processors round
	PYTEST="$(WORKERS_PYTEST)" sh tests/support/processors.sh $(ARGS)

# Each process of each test counts its lines. Python 3.11 takes more than an hour for that; a newer one, which tells coverage of a
# line once: make test-coverage VENV=.venv-python3.12 PYTHON=python3.12
test-coverage: $(VENV)/ready-test $(VENV)/system-packages  ## how many lines of the package the suite runs
	@$(BIN)/python $(PIP) install "coverage>=7.10"
	@rm -rf .coverage-data && mkdir .coverage-data
	@export COVERAGE_FOLDER=$(CURDIR)/.coverage-data COVERAGE_RCFILE=$(CURDIR)/tests/support/coverage.ini; \
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon; \
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --max-worker-restart 0 $(ARGS); passed=$$?; \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --sort=miss | tail -60; exit $$passed

check: $(VENV)/ready-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 types-of-package calls-of-others

types-of-package: $(VENV)/ready-dev
	$(BIN)/pyright

# Of what is not the package only the calls are checked: a test of a part that is skipped here is read here.
calls-of-others: $(VENV)/ready-dev
	$(BIN)/pyright -p pyright-calls.json

format: $(VENV)/ready-dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEER)/constraints.txt:
	@echo "a second environment in $(PEER) with the public package, to compare with"
	@$(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python $(PIP) install "$(TORCH)" numpy
	@$(PEER)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(PEER)/ready: $(PEER)/constraints.txt tests/clients/peer.txt
	@$(PEER)/bin/python $(PIP) install -c $(PEER)/constraints.txt -r tests/clients/peer.txt
	@touch $@

bench-peer: $(PEER)/ready  ## make the environment of the public package

bench: $(VENV)/ready-test $(PEER)/ready  ## measure against raw torch and the public package
	$(BIN)/python -m benchmarks $(ARGS)

bench-scaling: $(VENV)/ready-test $(PEER)/ready  ## measure calls on 2 to 32 processes, and draw docs/scaling.png
	$(BIN)/python -m benchmarks.scaling $(ARGS)

gpu: $(VENV)/ready-test  ## tests and benchmarks of this machine's accelerator, in 25 minutes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

docs: $(VENV)/ready-docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove what the targets made
	rm -rf $(VENV) $(PEER) $(CLIENTS) $(CLIENTS_PEER) $(TRACKERS) $(XLA) $(RAY) .venv-torch-* site runs .pytest_cache .ruff_cache
