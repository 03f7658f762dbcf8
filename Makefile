# Every task has one way to do it. `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup setup-dev model demo test check format protos bench-default clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## virtual environment with what the demo needs (PYTHON=python3.12 picks the Python)
	@$(PYTHON) tools/setup.py

setup-dev: ## the same with what the tests and checks need
	@$(PYTHON) tools/setup.py --dev

model: setup ## fetch the default model and convert it, once
	@$(BIN)/omnistage fetch-default

demo: model ## ask a question, hear the answer: demo.wav and demo-timeline.png
	@$(BIN)/omnistage ask "How do plants make food?" --out demo.wav --timeline demo-timeline.png

# Exit status 5 of pytest: no test of that half was asked for.
test: setup-dev model ## all tests: light ones two at a time, then those that need the machine alone (ARGS=... goes to pytest)
	@status=0; \
	$(BIN)/pytest -n 2 --dist loadfile -m "not serial" $(ARGS) || [ $$? -eq 5 ] || status=1; \
	$(BIN)/pytest -m serial $(ARGS) || [ $$? -eq 5 ] || status=1; \
	exit $$status

check: setup-dev ## lint, types, contract, import rules, container files
	@$(BIN)/python tools/check.py

format: setup-dev ## put all Python files into the one form
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

protos: setup-dev ## generate the stubs from the protos
	@$(BIN)/python tools/protos.py

bench-default: setup-dev model ## figures of the default model: benchmarks/out/default.json
	@$(BIN)/python -m benchmarks.default

clean: ## remove what was built; the virtual environment and the fetched model stay
	@rm -rf build dist demo.wav demo-timeline.png benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
