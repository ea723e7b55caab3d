# ringattn: `make` lists what can be made. Everything runs in .venv, which `make install` (or any target) creates.
PYTHON ?= python3
VENV := .venv
RUN := PYTHONPATH=. OMP_NUM_THREADS=1 $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
WHAT ?= trl
WORKERS := -n 3 --dist worksteal  # tests that start ranks wait a good part of their time

.PHONY: help install test test-slow test-both test-with test-newest test-oldest test-ray test-gpu test-hosts test-compile \
        test-mutants train bench pictures docs packages lint types

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(READY)  ## make .venv with everything the tests and the training need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	  --config-settings editable_mode=compat --editable '.[dev,train]'  # compat: found beside a clone of that name, too
	@touch $@

test: $(READY)  ## run the tests: no GPU needed, about four minutes on two cores
	$(RUN)/python -m pytest $(WORKERS) -m 'not slow and not gpu and not compile' --durations=15 $(ARGS)

test-slow: $(READY)  ## run what takes long, a quarter of an hour more: restarts, kernels compiled for GPUs
	$(RUN)/python -m pytest $(WORKERS) -m 'slow and not gpu and not ray' --durations=15 $(ARGS)

test-both: $(READY)  ## run the tests of test and of test-slow, in one start
	$(RUN)/python -m pytest $(WORKERS) -m 'not gpu and not compile and not ray' --durations=25 $(ARGS)

test-with: .venv-$(WHAT)/.ready  ## run the tests with another library (WHAT=trl), in a virtual environment of its own
	PYTHONPATH=. OMP_NUM_THREADS=1 .venv-$(WHAT)/bin/python -m pytest tests/test_$(WHAT).py --durations=5 $(ARGS)

test-newest: .venv-newest/.ready  ## run the tests, and TRL's, with the newest versions of all that pyproject.toml allows
test-oldest: .venv-oldest/.ready  ## run them with the oldest versions that it allows
test-newest test-oldest: test-%:
	PYTHONPATH=. OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(WORKERS) -m 'not slow and not gpu and not compile' $(ARGS)
	PYTHONPATH=. OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(WORKERS) -m slow tests/test_trl.py $(ARGS)

WITH_trl := --constraint constraints.txt pytest hypothesis --editable '.[trl]'
WITH_newest := --editable '.[dev,trl]'
WITH_oldest := --constraint .venv-oldest/versions $(WITH_newest)

.venv-trl/.ready .venv-newest/.ready .venv-oldest/.ready: .venv-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -oE '[a-z0-9-]+(\[[a-z,]+\])?>=[0-9a-z.]+' pyproject.toml | sed -E 's/\[.*\]//; s/>=/==/' > .venv-$*/versions
	.venv-$*/bin/python -m pip install --quiet --config-settings editable_mode=compat $(WITH_$*)
	@touch $@

test-ray: $(READY)  ## run all that needs a Ray cluster, emulated here: minutes
	$(RUN)/python -m pytest tests/test_ray.py --durations=5 $(ARGS)

test-gpu:  ## run the tests that need a GPU, with the python that holds torch for it
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(ARGS)

test-hosts: $(READY)  ## run every strategy and route between two and four hosts with slow links, emulated here (Linux, root): half an hour
	$(RUN)/python tests/hosts.py $(ARGS)

test-compile: $(READY)  ## compile every kernel for every GPU and TPU it has tile sizes for, and models in every way: a quarter of an hour
	$(RUN)/python -m pytest $(WORKERS) -m compile --durations=15 $(ARGS)

test-mutants: $(READY)  ## change the source in many small ways, each of which a named quick test must notice
	$(RUN)/python tests/mutants.py $(ARGS)

train: $(READY)  ## train a small model whose sequence is spread over ranks
	$(RUN)/python -m ringattn train $(ARGS)

bench: $(READY)  ## measure on this machine (ARGS='ring out=FILE', 'kernels', ...)
	$(RUN)/python -m ringattn bench $(or $(ARGS),ring device=cpu ranks=2 tokens=8192 heads=8 kv_heads=2 head_dim=64)

pictures: $(READY)  ## draw the pictures of docs/, and write the signatures into its reference
	$(RUN)/python docs/pictures/draw.py
	$(RUN)/python docs/signatures.py

docs: .venv-docs/.ready  ## check the spelling of docs and code, and build the site into site/, strictly: no warnings
	.venv-docs/bin/codespell
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material mkdocstrings-python codespell ruff build twine
	@touch $@

packages: .venv-docs/.ready  ## build the wheel and the sdist into dist/, and try each alone in an environment of its own
	rm -rf dist && .venv-docs/bin/python -m build --outdir dist .
	.venv-docs/bin/twine check --strict dist/*
	for package in dist/*.whl dist/*.tar.gz; do \
	  rm -rf .venv-smoke && $(PYTHON) -m venv .venv-smoke && \
	  .venv-smoke/bin/python -m pip install --quiet --constraint constraints.txt "$$package[torch]" && \
	  (cd .venv-smoke && bin/ringattn --version && bin/ringattn verify random=20 && \
	   bin/ringattn plan device=cuda seq_len=131072 heads=32,8 head_dim=128 sequence=8) || exit 1; \
	done; rm -rf .venv-smoke

lint: $(READY)  ## check style and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)  ## check types
	$(VENV)/bin/mypy
