# On a fresh machine with Python 3.11 to 3.13, `make demo` and `make test` each need nothing else.
# Every target is idempotent: what is finished stays, what was interrupted goes on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
DEMO := demo

# Short rows and small batches, so that a CPU makes many updates in minutes; a cosine that ends with
# the run. Real runs keep the defaults: 512 -> 114, 128 rows, T5's "constant * rsqrt_decay".
DEMO_STEPS ?= 2200
DEMO_FLAGS = --train_steps=$(DEMO_STEPS) --batch_size=8 --lengths.inputs=128 --lengths.targets=29 \
    --optimizer.learning_rate=0.03 --optimizer.warmup_steps=50 \
    --optimizer.schedule='constant * linear_warmup * cosine_decay' \
    --optimizer.steps_per_cycle=$(DEMO_STEPS) --metrics.every_steps=50 \
    --evaluation.every_steps=200 --checkpoint.every_steps=200

# The tests and the demo are measured on the CPU; a GPU or TPU is for real runs.
export JAX_PLATFORMS ?= cpu
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: help install demo demo-gcs test test-slow chaos chaos-train benchmark check format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# One stamp per set of packages; pyproject.toml or constraints.txt newer than it: install again.
$(VENV)/.demo: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages of the demo into $(VENV) (about 1.5 GB, a few minutes)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.demo
	@echo "installing the packages of the tests into $(VENV) (TensorFlow for stock seqio: 2 GB more)"
	@$(PIP) --editable '.[dev]'
	@touch $@

install: $(VENV)/.dev ## make .venv with everything that demo, tests and checks need

demo: $(VENV)/.demo ## built-in corpus -> vocabulary -> cache -> pretrained T5, in minutes
	@$(MAKE) --no-print-directory demo-at AT=$(DEMO)

# The demo with its vocabulary, cache and model under $(AT), a folder or a gs:// URL.
.PHONY: demo-at
demo-at:
	$(BIN)/python -m vocab.train --corpus=python_docs --vocab_size=8000 --output=$(AT)/vocabulary
	$(BIN)/python -m pipeline.build --task=python_docs_span_corruption \
	    --vocabulary=$(AT)/vocabulary --cache_dir=$(AT)/cache --row_tokens=141
	$(BIN)/python -m trainer.pretrain --preset=t5_1_1_mini --task=python_docs_span_corruption \
	    --cache_dir=$(AT)/cache --model_dir=$(AT)/model $(DEMO_FLAGS)
	$(BIN)/python -m trainer.evaluate --model_dir=$(AT)/model --checkpoints=all
	$(BIN)/python -m trainer.report --model_dir=$(AT)/model

demo-gcs: $(VENV)/.dev demo ## the demo in a bucket of this machine, 5 % of whose answers fail: the same?
	$(BIN)/python -m tests.gcs_server --faults=0.05 --seed=1 -- \
	    $(MAKE) --no-print-directory demo-at same-demo AT=gs://bucket/demo

.PHONY: same-demo
same-demo:
	$(BIN)/python -m tests.same_demo $(DEMO) $(AT)

test: $(VENV)/.dev ## all tests, under 12 minutes on 2 cores
	$(BIN)/python -m pytest -m 'not slow' --numprocesses=2 --dist=loadfile --durations=15

test-slow: $(VENV)/.dev ## what the test suite leaves out for its length
	$(BIN)/python -m pytest -m slow --durations=15

chaos: $(VENV)/.demo ## 100 SIGKILLs and other faults; every cache must come out equal
	$(BIN)/python -m vocab.train --corpus=python_docs --vocab_size=8000 \
	    --output=$(DEMO)/vocabulary
	$(BIN)/python -m pipeline.chaos --vocabulary=$(DEMO)/vocabulary --kills=100 --workers=1-4 --seed=7

chaos-train: $(VENV)/.demo ## a run killed 10 times; it must end in the same bits (after make demo)
	@rm -rf $(DEMO)/chaos
	$(BIN)/python -m trainer.chaos --model_dir=$(DEMO)/chaos --cache_dir=$(DEMO)/cache \
	    --kills=10 --steps=200 --seed=7

benchmark: $(VENV)/.dev ## builds beside SentencePiece alone, batches beside T5's, about 12 minutes
	$(BIN)/python -m benchmarks.text --output=$(DEMO)/text.parquet
	$(BIN)/python -m benchmarks.tokenize --text=$(DEMO)/text.parquet --train=unigram:8000 \
	    --train=unigram:32000 --train=unigram:250000 --train=bpe:32000
	$(BIN)/python -m vocab.train --corpus=parquet:$(DEMO)/text.parquet --vocab_size=32000 \
	    --output=$(DEMO)/text_vocabulary
	$(BIN)/python -m benchmarks.build --text=$(DEMO)/text.parquet \
	    --vocabulary=$(DEMO)/text_vocabulary --copies=10
	$(BIN)/python -m benchmarks.input_pipeline

check: $(VENV)/.dev ## lint, format, types and container files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile.*

format: $(VENV)/.dev ## put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and what the demo made
	rm -rf $(VENV) $(DEMO)
