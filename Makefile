# The daily commands. They need Python 3.11 or newer, pip and make; everything else goes into .venv.
# PYTHON3 names the interpreter that .venv is made with; EXTRAS what is installed besides perdure itself.
PYTHON3 ?= python3
EXTRAS ?= acp,dev,encryption,engines,llm,mcp,otel,peers,postgres,serve,workers
JOBS ?= 4
ARGS ?=

# Tests start hundreds of processes, which would each compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
OTHERS := .venv-others
OTHERS_STAMP := $(OTHERS)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
WHEEL := .venv-wheel
WHEEL_STAMP := $(WHEEL)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo browser test lint format bench bench-others peers wheel torture docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do printf '  make %-12s %s\n' "$$name" "$$what"; done

venv: $(STAMP) ## make .venv and install perdure into it with its pinned dependencies

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON3) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "perdure needs Python 3.11 or newer, and %s is Python %s. Name another one: make PYTHON3=/path/to/python3.11 $(MAKECMDGOALS)" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP) ## a tour without a key: talk, be killed, recover, fork, compact
	@$(VENV)/bin/perdure tour

# PERDURE_CHROMIUM names a browser; without it one is looked for, and installed where this user may install packages.
browser: ## find or install the Chromium that tests drive through the inspector
	@$(PYTHON3) tests/server/chromium.py

# Assertions in fresh files are rewritten once, on two cores, and not by each of the JOBS for itself.
tests/__pycache__: $(STAMP)
	@$(PYTHON) -m pytest --collect-only -qq tests/[a-r]* >/dev/null & \
	$(PYTHON) -m pytest --collect-only -qq tests/[s-z]* >/dev/null; wait

test: $(STAMP) browser | tests/__pycache__ ## run the tests (ARGS="-k name" narrows them)
	$(PYTHON) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(STAMP) ## lay the code out and fix what ruff can fix
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

bench: $(OTHERS_STAMP) ## run the benchmarks and say which figures keep their bounds
	$(OTHERS)/bin/python -m benchmarks $(ARGS)

bench-others: $(OTHERS_STAMP) ## measure perdure beside other libraries' session stores
	$(OTHERS)/bin/python -m benchmarks.others $(ARGS)

$(OTHERS_STAMP): benchmarks/others/requirements.txt pyproject.toml
	$(PYTHON3) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/others/requirements.txt -e .
	@touch $(OTHERS_STAMP)

peers: $(PEERS_STAMP) ## run the frameworks' own test suites on perdure's adapters (ARGS="openai-agents" one of them)
	$(PEERS)/bin/python tests/peers --jobs $(JOBS) $(ARGS)

$(PEERS_STAMP): tests/peers/requirements.txt pyproject.toml constraints.txt
	$(PYTHON3) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/peers/requirements.txt -e '.[dev,peers]'
	@touch $(PEERS_STAMP)

wheel: $(WHEEL_STAMP) ## build the package, install it and each extra in empty environments, use it (ARGS="--python /path/to/python3.13")
	$(WHEEL)/bin/python tests/packaging $(ARGS)

$(WHEEL_STAMP): constraints.txt
	$(PYTHON3) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip build
	@touch $(WHEEL_STAMP)

torture: $(STAMP) browser ## run the tests with many more examples and rounds; takes long
	PERDURE_TORTURE=1 $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --timeout=7200 $(ARGS)

docs: $(DOCS_STAMP) ## run every Python block in README.md and docs/, and build the site in build/site
	$(PYTHON) -m pytest tests/test_docs.py -n $(JOBS) $(ARGS)
	$(PYTHON) -m mkdocs build --strict --quiet
	@echo 'Open build/site/index.html'

$(DOCS_STAMP): $(STAMP)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(DOCS_STAMP)

clean: ## remove .venv and everything that tools have written
	rm -rf $(VENV) $(OTHERS) $(PEERS) $(WHEEL) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
