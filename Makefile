# Everything works from a fresh clone with Python >= 3.10 and make: each target first builds what it needs.
# Choose another interpreter with PYTHON=..., another place for the environment with VENV=...

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# Two processes with one thread each beat one process with two on the tests' tiny tensors.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --quiet
# What the modules of other packages are tested with. litgpt holds transformers below 5, so they have a place of their own.
FOREIGN := litgpt==0.5.11 pytorch-forecasting==1.8.0 pytorch-metric-learning==2.9.0
# Training runs of a study at a time.
JOBS ?= 2
SOURCES := lightning_ledger examples tests benchmarks docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs formats tune test test-slow test-foreign lint format bench clean \
	study-fidelity study-windows study-map

help: ## show this text
	@echo "lightning-ledger: what would your Lightning run cost with most gradients from idle inference hardware?"
	@echo
	@echo "  make demo        train a small GPT seven ways, compare what each one cost (about 10 minutes, 2 cores)"
	@echo "  make docs        put the last demo's picture and table into README.md and docs/"
	@echo "  make formats     measure every number format, put the table into docs/formats.md (about 10 minutes)"
	@echo "  make tune        redo the learning-rate sweep behind the demo (about 30 minutes)"
	@echo "  make test        run the tests, doctests included"
	@echo "  make test-slow   run the slow tests too"
	@echo "  make test-foreign  train modules of other packages, in an environment of their own (about 10 minutes)"
	@echo "  make lint        ruff, formatting and types"
	@echo "  make format      let ruff format and fix what it can"
	@echo "  make bench       measure the plug-in's own overhead, and steps as programs in each number format"
	@echo "  make study-fidelity  how good predictions are, by model size and format, into results/ (hours, resumable)"
	@echo "  make study-windows   train many arms at tuned learning rates and three seeds, into results/ (hours, resumable)"
	@echo "  make study-map       break-even prices by format and model size, from the results of study-fidelity"
	@echo "  make clean       remove the environment, caches and demo runs"
	@echo
	@echo "Then, for your own runs:  $(BIN)/lightning-ledger --help"

# Stamps, one per stage of the environment. torch comes first and alone, so that no other package picks its build.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10. Pass another: make PYTHON=python3.11"; exit 1; }
	@echo "[1/3] environment in $(VENV), with torch"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	@echo "[2/3] lightning-ledger and what it needs"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "[3/3] tools for tests and linting"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)-foreign/.done: constraints.txt pyproject.toml
	@echo "modules of other packages, in $(VENV)-foreign"
	@$(PYTHON) -m venv $(VENV)-foreign
	@$(VENV)-foreign/bin/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@grep -v '^transformers' constraints.txt > $(VENV)-foreign/constraints.txt
	@$(VENV)-foreign/bin/python -m pip install -qq --disable-pip-version-check \
		--constraint $(VENV)-foreign/constraints.txt --editable '.[foreign]' $(FOREIGN)
	@touch $@

demo: $(VENV)/.core
	@$(BIN)/python examples/demo.py run

docs: $(VENV)/.core
	@$(BIN)/python docs/update_demo.py

formats: $(VENV)/.core
	@$(BIN)/python -m docs.update_formats

tune: $(VENV)/.core
	@$(BIN)/python examples/demo.py tune

test: $(VENV)/.dev
	@$(PYTEST)

test-slow: $(VENV)/.dev
	@$(PYTEST) -m "slow or not slow"

test-foreign: $(VENV)-foreign/.done
	@OMP_NUM_THREADS=1 $(VENV)-foreign/bin/python -m pytest --numprocesses 2 --quiet -m slow tests/test_foreign_*.py

lint: $(VENV)/.dev
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks

# A study that was stopped goes on where it stood. docs/results.md is written from what is in results/.
study-fidelity study-windows: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.study $(@:study-%=%) --jobs $(JOBS)
	@$(BIN)/python -m docs.update_results

study-map: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.study map
	@$(BIN)/python -m docs.update_results

clean:
	rm -rf $(VENV) $(VENV)-foreign runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lightning_ledger examples tests -name __pycache__ -prune -exec rm -rf {} +
