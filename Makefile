# expertmaps: see README.md. `make demo` and everything below it that needs a cluster wants root on a
# machine of its own: it installs packages and adds bridges, nftables rules and ports.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CLUSTER_TOOL := tests/cluster/cluster

.PHONY: help demo demo-down test test-full unit lint api hook e2e venv crds clean

help: ## Show the targets.
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-10s %s\n", $$1, $$2}'

demo: venv ## Run the whole main job with real parts (CLUSTER=current IMAGE=... uses your own cluster).
	$(PY) -m tests.demo up

demo-down: venv ## Remove everything that `make demo` made.
	$(PY) -m tests.demo down

test: venv ## Every test but the long ones: unit, API server, hook, end to end.
	$(PY) tests/run.py unit api hook e2e

unit: venv ## Lint, types, import rules and the fast tests.
	$(PY) tests/run.py unit

api: venv ## Tests against a real kube-apiserver.
	$(PY) tests/run.py api

hook: venv ## Tests of the hook in vLLM and torch, on the CPU.
	$(PY) tests/run.py hook

e2e: venv ## Tests on the local cluster.
	$(PY) tests/run.py e2e

test-full: venv ## The long tests and the benchmarks; writes a report below tests/reports.
	code=0; $(PY) tests/run.py full || code=$$?; $(PY) -m tests.full_report; exit $$code

lint: venv ## Ruff, mypy, import-linter.
	$(PY) tests/run.py lint

crds: venv ## Write crds/ from the API models.
	PYTHONPATH=operator:. $(PY) -m expertmaps_operator.api.crd crds charts/expertmaps/files/crds

venv: $(VENV)/.complete

$(VENV)/.complete: requirements/dev.txt
	tests/venv.sh $(PYTHON) $(VENV)
	touch $@

clean: ## Remove build output of this checkout.
	rm -rf $(VENV) .work .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
