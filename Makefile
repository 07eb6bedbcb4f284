# Every target builds its own environment in $(VENV) first; nothing else is needed but Python ≥ 3.11.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
KERNELS := tests/test_kernels.py tests/test_activated.py tests/test_lab_attention.py tests/test_lab_augment.py

.PHONY: demo test gpu lint bench docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[lab,dev]'
	@touch $@

# the model libraries that the tests attach to, and the engines and the audio reader that they use
$(VENV)/.families: $(VENV)/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[lab,dev,families,engines,audio]'
	@touch $@

# Triton comes with a torch for GPUs. Beside any other it compiles kernels for a GPU that is not there, and interprets them.
$(VENV)/.triton: $(VENV)/.families
	$(RUN) -c 'import triton' 2>/dev/null || $(RUN) -m pip install --quiet 'triton==3.7.1; platform_system == "Linux"'
	@touch $@

demo: $(VENV)/.installed  ## train a small ViT on real digits with and without dice; ends with a report
	$(RUN) -m explicit_dropout demo

test: $(VENV)/.triton lint  ## lint, types and all tests; those of kernels once more, interpreted
	$(RUN) -m pytest --numprocesses 2 --dist worksteal
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(RUN) -m pytest --numprocesses 2 --dist worksteal -k 'not compil' $(KERNELS)

gpu: $(VENV)/.families  ## what a GPU has to pass after any change in a kernel
	$(RUN) -m pytest $(KERNELS) tests/test_lab_gpu.py tests/test_precision.py tests/test_benchmarks.py
	compute-sanitizer --tool memcheck --error-exitcode 1 $(RUN) -m pytest tests/test_kernels.py -k equal_plain_torch

lint: $(VENV)/.families
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.families  ## what explicit dropout costs on this machine: a training step, and one layer against the traces
	$(RUN) benchmarks/step_time.py --budget 0.5
	$(RUN) benchmarks/functional.py --tokens 64 --widths 192 384 --growth 256 512

docs: $(VENV)/.installed  ## the documentation site, in site/
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf $(VENV) site build .mypy_cache .pytest_cache .ruff_cache .hypothesis
