# make run [PROMPT="..."]   answer a prompt with three local services, preparing whatever is missing
# make test                 everything that a change must pass
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Rewrite this text and correct the spelling: The litle boat saild across the blue see. The old captain stood at the weel and sang a song about the wind. At nite the stars came out, and the litle boat saild back to the harbor.

# One pin, in pyproject.toml: executorch is built against one torch.
TORCH := $(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# A venv whose Python is gone (moved, upgraded) is made anew.
$(shell $(BIN)/python -c '' 2>/dev/null || rm -rf $(VENV))

# As typed: a "$" in a prompt is no make variable.
override PROMPT := $(value PROMPT)
export PROMPT
.PHONY: run test lint format protos bench install install-dev clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	@$(BIN)/splitspec run -- "$$PROMPT"

test: lint $(VENV)/.installed-dev
	@$(BIN)/splitspec model pull smollm2-135m || echo "note: the real model could not be pulled;" \
		"the tests that need it are skipped" >&2
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy protos/splitspec graph_runtime verifier_service drafter_service coordinator

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Stubs are committed, so only a change of the contract needs this.
protos: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos \
		protos/splitspec/v1/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iprotos --grpc_python_out=protos \
		protos/splitspec/v1/verifier.proto protos/splitspec/v1/drafter.proto \
		protos/splitspec/v1/generation.proto

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/wire.py

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV)

# A stamp newer than pyproject.toml means that nothing has to be installed again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing splitspec into $(VENV) (once; a minute or two)"
	@$(call install_torch)
	$(BIN)/python -m pip install -e '.[cpu]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -e '.[cpu,dev]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: splitspec needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>&1); try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# On Linux the plain wheel brings gigabytes of CUDA that a CPU never uses. The CPU wheel comes from
# wherever pip already looks, or else from PyTorch's own index.
define install_torch
	if [ "$$(uname -s)" = Linux ] \
		&& ! $(BIN)/python -c "from importlib.metadata import version; \
			assert version('torch').split('+')[0] == '$(TORCH)'" 2>/dev/null; then \
		$(BIN)/python -m pip install "torch==$(TORCH)+cpu" 2>/dev/null \
			|| $(BIN)/python -m pip install "torch==$(TORCH)+cpu" --extra-index-url $(CPU_TORCH_INDEX); \
	fi
endef
