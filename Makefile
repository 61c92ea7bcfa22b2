# `make demo` and `make test` need only Python 3.11 to 3.13. Every target can be rerun: finished work
# is kept, interrupted work is resumed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports; pip would compile all files, a quarter of the installation's time.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt
DEMO := demo

# The tests and the demo run on the CPU.
export JAX_PLATFORMS ?= cpu
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: help install native demo demo-gcs docs ci test test-processes test-peers test-slow test-rehearsals test-engines test-wheel test-browser pictures fuzz fuzz-builds fuzz-runs fuzz-tokenizers fuzz-configs chaos chaos-train chaos-follow chaos-recipe sanitize benchmark measure rehearse-measure check format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# One stamp file per set of packages; a newer pyproject.toml or constraints.txt installs them again.
NATIVE := $(wildcard pipeline/native/*.[ch]) pipeline/native/build.py
$(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages of the demo into $(VENV) (about 1.5 GB, a few minutes)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.demo
	@echo "installing the packages of the tests into $(VENV) (300 MB more)"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.peers: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.dev
	@echo "installing TensorFlow, torch and other peers into $(VENV) (4 GB, 7 GB with CUDA's torch)"
	@$(PIP) --editable '.[peers]'
	@touch $@

$(VENV)/.lint: pyproject.toml constraints.txt | $(VENV)/.dev
	@$(PIP) --editable '.[lint]'
	@touch $@

install: $(VENV)/.peers $(VENV)/.lint ## create .venv with all packages of the tests and checks

native: ## compile the C code of pipeline/native in this checkout
	@$(BIN)/python -c 'from pipeline.native import build; print(*build.compile_all(), sep="\n")'

demo: $(VENV)/.demo ## built-in corpus -> vocabulary -> cache -> pretrained T5, in minutes
	@$(MAKE) --no-print-directory demo-at AT=$(DEMO)

# The demo with its vocabulary, cache and model under $(AT), a folder or a gs:// URL. At the end the
# T5 fills gaps in sentences that it has not read.
.PHONY: demo-at
demo-at:
	$(BIN)/python -m palimpsest run recipes/demo.toml --folder=$(AT)
ifneq ($(and $(wildcard trainer/annexes/suites),$(wildcard tasks/annexes/making_questions)),)
	$(BIN)/palimpsest make_questions --corpus=python_docs --kinds=seen --output=$(AT)/questions
	$(BIN)/palimpsest fill --questions=$(AT)/questions/seen.jsonl --model_dir=$(AT)/model \
	    --max_new_tokens=7
endif

demo-gcs: $(VENV)/.peers demo ## run the demo in a local bucket that fails 5 % of requests, and compare the results
	$(BIN)/python -m tests.support.servers.gcs --faults=0.05 --seed=1 -- \
	    $(MAKE) --no-print-directory demo-at same-demo AT=gs://bucket/demo

.PHONY: same-demo
same-demo:
	$(BIN)/python -m tests.support.same_demo $(DEMO) $(AT)

$(VENV)/.docs: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation site into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

ci: check docs test test-processes test-peers ## run what CI runs: checks, then tests

# Each file's tests run in one process, the longest files first.
PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15

test: $(VENV)/.dev ## run the tests that need no other program and no whole run, in minutes
	$(PYTEST) -m 'not slow and not processes'

test-processes: $(VENV)/.dev ## run the tests of whole processes and runs, faults, sweeps over models
	$(PYTEST) -m 'processes and not slow'

# One run of pytest for each peer, so that TensorFlow and torch never meet in one process.
PEERS := tensorflow torch google wandb notebook
test-peers: $(PEERS:%=test-peer-%) ## run the tests that need TensorFlow, torch, gcsfs or others
.PHONY: $(PEERS:%=test-peer-%)
$(PEERS:%=test-peer-%): test-peer-%: $(VENV)/.peers
	$(PYTEST) --peer=$* -m 'not slow'

test-slow: $(VENV)/.peers ## run the slow tests
	$(BIN)/python -m pytest -m slow --durations=15
	for peer in $(PEERS); do $(BIN)/python -m pytest -m slow --peer=$$peer || exit; done

test-rehearsals: $(VENV)/.peers ## rehearse every recipe of the tree, with data sets from a local Hub
	$(BIN)/python -m pytest tests/palimpsest/test_rehearsals.py -m slow --durations=0

$(VENV)/.browser: pyproject.toml constraints.txt | $(VENV)/.dev
	@$(PIP) --editable '.[browser]'
	@test -n "$(CHROMIUM)" || which chromium google-chrome > /dev/null || \
	    $(BIN)/playwright install chromium
	@touch $@

test-browser: $(VENV)/.browser ## open the pages in Chromium, at 390 and 1280 pixels, light and dark
	$(BIN)/python -m pytest -m browser --durations=5

# Two short runs, of which the page is the picture in the README.
RATES := 0.01 0.03
pictures: $(VENV)/.browser ## take the pictures of the docs from pages (after make demo)
	for rate in $(RATES); do \
	    $(BIN)/python -m trainer.pretrain --preset=t5_1_1_tiny --task=python_docs_span_corruption \
	    --cache_dir=$(DEMO)/cache --model_dir=$(DEMO)/rates/$$rate --train_steps=600 \
	    --batch_size=8 --lengths.inputs=128 --lengths.targets=29 \
	    --optimizer.learning_rate=$$rate --optimizer.warmup_steps=50 \
	    --optimizer.schedule='constant * linear_warmup * cosine_decay' \
	    --optimizer.steps_per_cycle=600 --metrics.every_steps=10 --evaluation.every_steps=100 \
	    --checkpoint.every_steps=300 || exit; done
	$(BIN)/palimpsest report $(RATES:%=$(DEMO)/rates/%) --output=$(DEMO)/rates/report.html
	$(BIN)/python -m tests.support.browser $(DEMO)/rates/report.html docs/report.png \
	    --width=1120 --height=480 --scroll_to='#curves'
	$(BIN)/python -m tests.support.browser $(DEMO)/rates/report.html docs/report_phone.png \
	    --width=390 --height=800 --scroll_to='#curves' --dark

$(VENV)/.engines: pyproject.toml constraints.txt | $(VENV)/.dev
	@echo "installing Spark and Ray into $(VENV) (720 MB); Spark also needs Java 17 or later"
	@$(PIP) --editable '.[spark,ray]'
	@touch $@

test-engines: $(VENV)/.engines ## build on clusters of Spark and Ray on this machine, and kill workers
	$(BIN)/python -m pytest tests/pipeline/runners/test_clusters.py tests/pipeline/annexes/deduplication --peer=engines --durations=5

test-wheel: ## build the wheel, and go from texts to an export with nothing else (PIP_FLAGS: of pip install)
	scripts/wheel_errand.sh --python=$(PYTHON) --constraints=constraints.txt $(PIP_FLAGS)

fuzz: $(VENV)/.dev ## search for examples that break a property, each time among others
	$(BIN)/python -m pytest -m 'hypothesis and not slow' --hypothesis-profile=fuzz

# Builds, runs and tokenizers that combine features at random; NIGHTLY=10 makes ten times as many.
NIGHTLY ?= 1
FUZZ = $(BIN)/python -m tests.laboratory $(1) --count=$$(($(2) * $(NIGHTLY))) $(FUZZ_FLAGS)

fuzz-builds: $(VENV)/.dev ## compare 300 random builds, killed, extended and taken down, with an oracle
	$(call FUZZ,builds,300)

fuzz-runs: $(VENV)/.dev ## compare 60 random runs, killed and resumed, with an oracle
	$(call FUZZ,runs,60)

fuzz-tokenizers: $(VENV)/.peers ## compare 200 random tokenizers with their libraries, on 100,000 texts each
	$(call FUZZ,tokenizers,200)

fuzz-configs: $(VENV)/.peers ## compare 300 random config.json with transformers
	$(call FUZZ,configs,300)

sanitize: $(VENV)/.peers ## test the C code with ASan and UBSan, also on 10 random tokenizers, 5 minutes
	scripts/sanitize.sh $(BIN)/python

chaos: $(VENV)/.dev ## break builds by 100 SIGKILLs, Ctrl-Cs and SIGTERMs and 162 other faults, with an oracle
	$(BIN)/python -m tests.laboratory builds --large --count=6 --kills=24 --workers=1-4 --seed=7

chaos-train: $(VENV)/.dev ## break training runs 20 times and compare their results (after make demo)
	$(BIN)/python -m tests.laboratory runs --cache_dir=$(DEMO)/cache --kills=10 --damages=9 --steps=200 \
	    --seed=7

chaos-follow: $(VENV)/.dev ## break builds and the runs that follow them 15 times, and compare their results
	$(BIN)/python -m vocab.train --corpus=python_docs --vocab_size=8000 \
	    --output=$(DEMO)/vocabulary
	$(BIN)/python -m tests.laboratory followed --vocabulary=$(DEMO)/vocabulary --kills=15 --steps=200 \
	    --jobs=1 --seed=7

chaos-recipe: $(VENV)/.dev ## break the demo's recipe 20 times, in each stage, and compare the results
	$(BIN)/python -m tests.laboratory recipes --kills=20 --jobs=1 --seed=7

benchmark: $(VENV)/.peers ## compare builds with SentencePiece and batches with T5, about 12 minutes
	$(BIN)/python -m benchmarks.text --output=$(DEMO)/text.parquet
	$(BIN)/python -m benchmarks.tokenize --text=$(DEMO)/text.parquet --train=unigram:8000 \
	    --train=unigram:32000 --train=unigram:250000 --train=bpe:32000
	$(BIN)/python -m vocab.train --corpus=parquet:$(DEMO)/text.parquet --vocab_size=32000 \
	    --output=$(DEMO)/text_vocabulary
	$(BIN)/python -m benchmarks.build --text=$(DEMO)/text.parquet \
	    --vocabulary=$(DEMO)/text_vocabulary --copies=10
	$(BIN)/python -m benchmarks.input_pipeline

# The extra of this machine's accelerator.
DEVICE ?= $(if $(shell command -v nvidia-smi),gpu,tpu)
$(VENV)/.$(DEVICE): pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[$(DEVICE)]'
	@touch $@

measure: $(VENV)/.$(DEVICE) ## on a GPU or TPU: measure kernels, bits and steps, and write docs/benchmarks.md
	JAX_PLATFORMS= $(BIN)/python -m benchmarks.measure --output=$(DEMO)/measured \
	    --page=docs/benchmarks.md $(MEASURE_FLAGS)

rehearse-measure: $(VENV)/.dev ## the parts of `make measure` with tiny models on this machine's CPU
	@mkdir -p $(DEMO) && cp docs/benchmarks.md $(DEMO)/rehearsed.md
	$(BIN)/python -m benchmarks.measure --rehearse --output=$(DEMO)/rehearsed \
	    --page=$(DEMO)/rehearsed.md $(MEASURE_FLAGS)

check: $(VENV)/.peers $(VENV)/.lint ## check lint, format, types and container files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile.*

format: $(VENV)/.lint ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and the files of the demo
	rm -rf $(VENV) $(DEMO)
