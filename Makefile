# Every task has one way to do it. `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin
CHAOS_SECONDS ?= 600
SETUP_FLAGS := $(if $(REQUIRE_TORCH_HASH),--require-torch-hash) $(if $(DEVICE),--device $(DEVICE))
# The plugin of docker, or where it is missing the program of the same kind.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
# In a sentence what is missing, before anything is built.
HAS_COMPOSE = $(COMPOSE) version >/dev/null 2>&1 || { echo "make $@ needs Docker with its compose plugin, and neither 'docker compose' nor docker-compose is here (docs/compose.md); without containers: .venv/bin/omnistage serve" >&2; exit 1; }; \
	told=$$($(COMPOSE) ls 2>&1 >/dev/null) || { echo "make $@: the docker daemon does not answer, start it (systemctl start docker) or ask for leave to use it: $$told" >&2; exit 1; }

.PHONY: help setup setup-dev model demo demo-draw examples up down test test-near test-long test-costs check format lock wheels protos bench-default bench-engine bench-pipeline bench-code2wav bench-diffusion bench-gateway bench-resilience chaos clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[^ \t:#]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## virtual environment with what the demo needs (PYTHON=python3.12 picks the Python, DEVICE=cuda the build of torch)
	@$(PYTHON) tools/setup.py $(SETUP_FLAGS)

setup-dev: ## the same with what the tests and checks need
	@$(PYTHON) tools/setup.py --dev $(SETUP_FLAGS)
	@$(BIN)/python -m tools.apart

model: setup ## fetch the default model and convert it, once
	@$(BIN)/omnistage fetch-default >/dev/null

demo-draw: setup ## draw a picture: demo.png
	@$(BIN)/omnistage draw "a red heart on the left and a small yellow star on the right, on blue" --out demo.png --seed 7

demo: model ## ask a question, hear the answer, also demo.wav and demo-timeline.png; on a terminal its stack stays for half an hour, and a desktop opens its page
	@$(BIN)/python tools/demo.py

examples: setup-dev ## install, build and run the clients in Node, Go, C++ and Java (ARGS="node go" picks some)
	@$(BIN)/python -m tools.examples $(ARGS)

up: ## the same stack in containers: build, start, wait until it answers (ARGS="--scale talker=2" for a second Talker)
	@$(HAS_COMPOSE)
	@$(COMPOSE) up --build --detach --wait $(ARGS)
	@printf '\nomnistage answers at 127.0.0.1:%s. Ask it from here or from a container:\n' "$${OMNISTAGE_PORT:-50050}"
	@printf '  .venv/bin/omnistage ask "How do plants make food?" --out answer.wav --address 127.0.0.1:%s\n' "$${OMNISTAGE_PORT:-50050}"
	@printf '  a browser, or any client of OpenAI (docs/http.md): http://127.0.0.1:%s\n' "$${OMNISTAGE_HTTP_PORT:-8000}"
	@printf '  $(COMPOSE) run --rm ask "How do plants make food?"\nmake down ends it.\n'

down: ## let the running answers end, then remove the containers; the fetched model stays (ARGS=--volumes removes it too)
	@$(HAS_COMPOSE)
	@$(COMPOSE) down $(ARGS)

SUITE := $(BIN)/python -m tools.suite $(if $(AGAIN),--again)

test: setup-dev model ## every claim in its short form, as CI runs it (ARGS=... goes to pytest)
	@$(SUITE) $(ARGS)

# Runs what it chose as `make test` does. SHOW=1 leaves nothing to run.
test-near: setup-dev ## the tests nearest to what changed, in about two minutes (BASE=... the commit to compare with, SHOW=1: only says which)
	@chosen=$$($(BIN)/python -m tools.near $(if $(BASE),--base "$(BASE)") $(if $(SHOW),--show)) || exit 1; \
	[ -z "$$chosen" ] || $(MAKE) --no-print-directory test ARGS="$$chosen "'$(subst ','\'',$(ARGS))'

test-long: setup-dev model ## all tests, also the long forms that `make test` leaves out: hours (ARGS=tests/link for one area)
	@$(SUITE) --form long $(ARGS)

test-costs: setup-dev ## what each file of tests cost in the last run, dearest first (ARGS=--write: keep it as the table of the repository)
	@$(BIN)/python -m tools.costs $(ARGS)

check: setup-dev ## lint, types, contract, import rules, container files
	@$(BIN)/python tools/check.py

format: setup-dev ## put all Python files into the one form
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

# Without the set-up that it is needed for: only where there is no environment at all.
lock: ## renew constraints.txt and the hashes in requirements/ after a change of dependencies (ARGS=--upgrade: all newest)
	@[ -x $(BIN)/python ] || $(PYTHON) tools/setup.py --dev $(SETUP_FLAGS)
	@$(BIN)/python -m tools.lock $(ARGS)

wheels: ## dist/: the wheels of omnistage and of omnistage-pictures, the same bytes from the same files
	@$(PYTHON) -m tools.wheels

protos: setup-dev ## generate the stubs, options and tables from the protos
	@$(BIN)/python -m tools.protos
	@$(BIN)/python -m tools.options

bench-default: setup-dev model ## figures of the default model: benchmarks/out/default.json; fails when a goal is missed (ARGS=--report: prints only, ARGS=--smallest: sees that all parts run)
	@$(BIN)/python -m benchmarks.default $(ARGS)

bench-engine: setup-dev ## figures of the engine with the Thinkers of the Omni families, beside Transformers: benchmarks/out/engine.json; the same
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.engine $(ARGS)

bench-pipeline: setup-dev ## figures of Qwen2.5-Omni from question to sound, beside Transformers: benchmarks/out/pipeline.json; the same (ARGS="--family qwen3_omni": of Qwen3-Omni)
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.pipeline $(ARGS)

bench-code2wav: setup-dev model ## figures of sound made while it is spoken: benchmarks/out/code2wav.json; the same (ARGS=--docs: into the docs too)
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.code2wav $(ARGS)

bench-diffusion: setup-dev ## figures of pictures, films and sounds drawn step by step, beside Diffusers: benchmarks/out/diffusion.json; the same (ARGS="--device cuda": a GPU)
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.diffusion $(ARGS)

bench-gateway: setup-dev model ## what HTTP adds to gRPC: benchmarks/out/gateway.json; the same
	@$(BIN)/python -m benchmarks.gateway $(ARGS)

bench-resilience: setup-dev model ## figures of lost stages: benchmarks/out/resilience.json; the same
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.resilience $(ARGS)

chaos: setup-dev ## mixed load while processes are killed and stopped (CHAOS_SECONDS=600, ARGS="--seed N" repeats a schedule)
	@PYTHONPATH=tests $(BIN)/python -m chaos --seconds $(CHAOS_SECONDS) $(ARGS)

clean: ## remove what was built; the virtual environment and the fetched model stay
	@rm -rf build dist demo.wav demo-timeline.png demo.png demo-preview-*.png benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
