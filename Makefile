# torpor: `make demo` and `make test` set everything up themselves. `make help` lists the rest.
PYTHON  ?= python3
VENV    ?= .venv
# Worker processes of the test run; each runs torch on one thread.
WORKERS ?= 2
# Extra arguments, e.g. `make test-ops ARGS="-k softmax"`, `make demo ARGS="--steps 50"`.
ARGS    ?=
# The same for the whole steps of `make bench`, e.g. STEPS_ARGS="gpt --rounds 31 --plot steps.png".
STEPS_ARGS ?=

PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.torpor-installed
# Tests that fail run once more, alone; the log names those that passed only then.
TESTS  := $(PY) -m scripts.pytest_again -q
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(TESTS) -n $(WORKERS) --dist worksteal
QUICK  := -m "not slow and not gpu and not sweep"

# All test folders but those with a target of their own, so that no new folder is forgotten.
OTHER_TESTS = tests/ops/ tests/models/ tests/backends/ tests/browser/ tests/native/ tests/wild/ tests/distributed/
TEST_FILES = $(wildcard tests/*/test_*.py tests/*/*/test_*.py)
CORE_TESTS = $(filter-out $(OTHER_TESTS),$(sort $(foreach file,$(TEST_FILES),tests/$(word 2,$(subst /, ,$(file)))/)))

# What people install: the default backend, its cache on disk, the native library, two threads.
# (`make` keeps the cache, and the library in it, to itself.)
DEFAULT_CACHE := $(CURDIR)/.cache/test-defaults
DEFAULT_PYTEST = TORPOR_TEST_DEFAULTS=1 TORPOR_NATIVE=on TORPOR_CACHE_DIR=$(DEFAULT_CACHE) \
  $(TESTS) -n $(WORKERS) --dist worksteal
# A fixed slice of the operator table and of the models, for CI; `make sweep-defaults` runs all.
DEFAULT_PART = 3/16
DEFAULT_MODELS = bert or resnet or lstm-concrete or gpt2 or mamba-concrete or vae

# Models that CI also runs captured; `make sweep-capture` runs all.
CAPTURED_MODELS = test_training_equals_eager and concrete and (gpt2 or resnet or vit)

# The part of the operator table that CI runs on xla; `make sweep-backends BACKENDS=xla` runs all.
XLA_PART = 7/24

# The first seed of `make sweep-drawn`.
DRAWN_SEED ?= 100000

# Backends that run eager's own kernels: they give eager's bits.
EXACT_BACKENDS = reference torchscript
# What `make sweep-backends` runs on.
BACKENDS ?= $(EXACT_BACKENDS) inductor xla

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-core test-native test-ops test-models test-backends test-defaults test-wild test-distributed test-browser test-slow test-gpu \
        bench-gpu check codegen layout page format bench bench-wild wild-figures bench-steps bench-recording sweep sweep-ops sweep-kits sweep-capture sweep-defaults sweep-backends sweep-wild sweep-drawn sweep-signatures faults clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install torpor with its tools (once)
	@:

# The pins in constraints.txt choose the torch build; without them pip would fetch all of CUDA.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torpor needs Python 3.11 or newer: make PYTHON=python3.11 ...")' \
	  && echo "creating $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@echo "installing torpor and its tools into $(VENV) (once, a minute or more)"
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[cli,test,dev,xla]'
	@touch $@

demo: $(STAMP) ## train a small character GPT eagerly, on the default backend and on the reference
	@$(PY) -m torpor demo $(ARGS)

test: test-core test-native test-ops test-models test-backends test-defaults test-wild test-distributed test-browser ## all tests but the slow ones and the GPU's

test-core: $(STAMP) ## units, IR, laziness, API, properties, command line
	@printf '\n== core: %s ==\n' '$(CORE_TESTS)'
	@$(PYTEST) $(QUICK) $(CORE_TESTS) $(ARGS)

test-native: $(STAMP) ## the C++ recorder, in processes of its own: it stands before every op
	@printf '\n== native: the C++ recorder records what Python records ==\n'
	@$(PYTEST) $(QUICK) tests/native $(ARGS)
	@TORPOR_NATIVE=on $(PYTEST) $(QUICK) tests/property/test_signatures.py $(ARGS)
	@TORPOR_NATIVE=on $(PYTEST) $(QUICK) tests/capture $(ARGS)

test-ops: $(STAMP) ## every op_db entry against eager
	@printf '\n== ops: every op_db entry against eager ==\n'
	@$(PYTEST) $(QUICK) tests/ops $(ARGS)

test-models: $(STAMP) ## whole models: training steps against eager
	@printf '\n== models: training steps against eager ==\n'
	@$(PYTEST) $(QUICK) tests/models $(ARGS)
	@printf '\n== some models, captured ==\n'
	@TORPOR_CAPTURE=on $(PYTEST) $(QUICK) tests/models/test_training.py -k '$(CAPTURED_MODELS)' $(ARGS)

test-backends: $(STAMP) ## every backend: its tests, a fixed quarter of the conformance kit each, models
	@printf '\n== backends: their tests, and a part of the kit on inductor ==\n'
	@$(PYTEST) $(QUICK) tests/backends $(ARGS)
	@$(call run_kits,/4)
	@printf '\n== conformance kit on xla: op_db part $(XLA_PART) ==\n'
	@$(PYTEST) --pyargs torpor.testing --backend xla --part $(XLA_PART) $(ARGS)
	@printf '\n== models on torchscript: training steps against eager ==\n'
	@TORPOR_TEST_BACKEND=torchscript $(PYTEST) $(QUICK) tests/models/test_training.py -k 'test_training_equals_eager' $(ARGS)

# The conformance kit on each exact backend and kind of tensor: of N parts of op_db the next one each
# ("/4": every entry is run by one of the four), or all of op_db ("").
define run_kits
set -e; part=0; for backend in $(EXACT_BACKENDS); do for device in lazy concrete; do \
  part=$$((part + 1)); chosen="$(if $(1),--part $$part$(1))"; \
  printf '\n== conformance kit on %s, %s: op_db %s, forward and backward ==\n' $$backend $$device "$$chosen"; \
  $(PYTEST) --pyargs torpor.testing --backend $$backend --device $$device --bit-exact $$chosen $(ARGS); \
done; done
endef

test-defaults: $(STAMP) ## what people install (inductor, cache, native library, two threads): properties, slices of op_db and models
	@rm -rf $(DEFAULT_CACHE)
	@printf '\n== defaults: random programs ==\n'
	@$(DEFAULT_PYTEST) $(QUICK) tests/property/test_random_programs.py $(ARGS)
	@printf '\n== defaults: op_db, part $(DEFAULT_PART) ==\n'
	@$(DEFAULT_PYTEST) $(QUICK) tests/ops/test_opdb.py --part $(DEFAULT_PART) $(ARGS)
	@printf '\n== defaults: some models ==\n'
	@$(DEFAULT_PYTEST) $(QUICK) tests/models/test_training.py -k 'test_training_equals_eager and concrete and ($(DEFAULT_MODELS))' $(ARGS)

sweep-defaults: $(STAMP) ## the same with all of op_db and all models, and more random programs
	@rm -rf $(DEFAULT_CACHE)
	@TORPOR_PROPERTY_EXAMPLES=500 $(DEFAULT_PYTEST) $(QUICK) tests/property $(ARGS)
	@$(DEFAULT_PYTEST) $(QUICK) tests/ops/test_opdb.py tests/models/test_training.py $(ARGS)

sweep-capture: $(STAMP) ## models, random programs and the kit with all module calls captured, bit for bit
	@TORPOR_CAPTURE=on $(PYTEST) $(QUICK) tests/models tests/property/test_random_programs.py $(ARGS)
	@TORPOR_CAPTURE=on $(PYTEST) --pyargs torpor.testing --backend reference --device concrete --bit-exact $(ARGS)

sweep-kits: $(STAMP) ## the conformance kit on all of op_db, on both exact backends and both kinds of tensors
	@$(call run_kits)

test-wild: $(STAMP) ## programs as people write them, under enable() in the default configuration
	@printf '\n== wild: programs as people write them ==\n'
	@TORPOR_WILD_CACHE=$(DEFAULT_CACHE) $(PYTEST) $(QUICK) tests/wild $(ARGS)

test-distributed: $(STAMP) ## collectives, agreement and faults, on four ranks that all tests share
	@printf '\n== distributed: four ranks on gloo ==\n'
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(TESTS) -p no:xdist $(QUICK) tests/distributed $(ARGS)

test-browser: $(STAMP) ## the page of `torpor view` in a headless Chromium
	@printf '\n== browser: the page of torpor view in Chromium ==\n'
	@$(PYTEST) $(QUICK) tests/browser $(ARGS)

test-slow: $(STAMP) ## the tests that take minutes each
	@$(PYTEST) -m "slow and not gpu" --timeout 3600 tests $(ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA device
	@$(PY) -m pytest -q -m gpu tests $(ARGS)
	@printf '\n== all models on inductor, on the GPU, with the native library ==\n'
	@TORPOR_NATIVE=on TORPOR_TEST_BACKEND=inductor TORPOR_TEST_DEVICE=cuda TORPOR_TEST_COMPILE_AFTER=1 \
	  $(PY) -m pytest -q tests/models/test_training.py -k 'test_training_equals_eager and concrete' $(ARGS)

check: $(STAMP) ## ruff, formatter, strict types of src/, import directions, line limits, generated files
	@printf '\n== ruff ==\n'
	@$(PY) -m ruff check .
	@printf '\n== formatter ==\n'
	@$(PY) -m ruff format --check .
	@printf '\n== types (mypy --strict) ==\n'
	@$(PY) -m mypy
	@printf '\n== import directions ==\n'
	@$(PY) scripts/lint_imports.py
	@printf '\n== lines per package ==\n'
	@$(PY) scripts/layout.py --check
	@printf '\n== generated files ==\n'
	@$(PY) -m torpor.codegen.own_ops --check
	@$(PY) scripts/page.py

codegen: $(STAMP) ## rewrite the generated files: src/torpor/inference/_generated, docs/coverage.md, golden ones; stubs into .venv
	@$(PY) -m torpor.codegen.own_ops
	@$(PY) -m torpor codegen --coverage --markdown > docs/coverage.md
	@$(PY) -m pytest -q tests/golden --update-golden
	@$(PY) -m torpor codegen --stubs

layout: $(STAMP) ## count the lines of every package, into docs/layout.md
	@$(PY) scripts/layout.py

page: $(STAMP) ## rebuild the page of `torpor view` from web/ (needs node and npm)
	@cd web && npm ci --no-audit --no-fund && npm run build
	@$(PY) scripts/page.py --write

format: $(STAMP) ## rewrite the sources in house format
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

bench: bench-steps bench-recording ## the benchmarks: ratios of one run, in one table

bench-steps: $(STAMP) ## whole steps against eager, torch.compile and torch._lazy
	@$(PY) -m torpor bench $(STEPS_ARGS)

bench-wild: $(STAMP) ## twelve ordinary programs as torpor is installed, against eager and torch.compile
	@$(PY) -m torpor bench --wild $(ARGS)

wild-figures: $(STAMP) ## the same, and the figures into docs/benchmarks.md; on a quiet machine, half an hour
	@mkdir -p .cache
	@$(PY) -m torpor bench --wild --json .cache/wild.json $(ARGS)
	@$(PY) -m scripts.wild_figures .cache/wild.json --write docs/benchmarks.md

bench-recording: $(STAMP) ## what recording a step costs, and where it goes
	@$(PY) -m benchmarks $(ARGS)

bench-gpu: $(STAMP) ## whole steps, memory and cold compiles on a CUDA device
	@$(PY) -m benchmarks.gpu $(ARGS)

sweep: sweep-ops sweep-kits sweep-capture sweep-defaults sweep-backends sweep-wild sweep-drawn sweep-signatures ## all of it, surviving crashes and hangs: hours with inductor

sweep-ops: $(STAMP) ## op_db against eager as one table
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m tests.ops.sweep --jobs $(WORKERS) $(ARGS)

sweep-backends: $(STAMP) ## kit and models on BACKENDS, into docs/sweeps/; goes on where it was stopped
	@$(PY) -m scripts.sweep_backends $(BACKENDS) --jobs $(WORKERS)

sweep-wild: $(STAMP) ## every program alone, in every way, on the default backend and on reference
	@TORPOR_WILD_CACHE=$(DEFAULT_CACHE) $(PYTEST) -m sweep tests/wild $(ARGS)

sweep-drawn: $(STAMP) ## 2,000 drawn programs on reference and on inductor, into docs/sweeps/drawn.md
	@$(PY) -m scripts.drawn_programs --count 2000 --seed $(DRAWN_SEED) --jobs $(WORKERS) --write
	@$(PY) -m scripts.drawn_programs --count 2000 --seed $(DRAWN_SEED) --jobs $(WORKERS) --write --backend inductor
	@$(PYTEST) -m sweep tests/property/test_found.py $(ARGS)

sweep-signatures: $(STAMP) ## fifty drawn calls of each overload, recorded in every way
	@TORPOR_SIGNATURE_CALLS=50 TORPOR_NATIVE=on $(PYTEST) $(QUICK) tests/property/test_signatures.py $(ARGS)

faults: $(STAMP) ## train under 200 interrupts and 50 bad batches, beside eager
	@$(PY) -m scripts.faults --interrupts 200 --bad-batches 50 $(ARGS)

clean: ## remove caches (not .venv)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
