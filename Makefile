# make demo           create the environment, prepare data, train, evaluate, write the report (FRESH=1: train again).
#                     2.5 to 12 minutes on 2 CPU cores
# make test           create the environment, run linters, type checks and tests on all cores. On 2 cores 3.5
#                     minutes, without the installation
# make test-all       run make test, then the slow tests (such as launchers and notebooks), test-faults and test-chaos
# make test-faults    inject faults into real runs (every fault that a CPU can simulate)
# make test-chaos     kill a run repeatedly, and compare the result with that of an uninterrupted run
# make upgrade-check  check that the newest transformers, accelerate and DeepSpeed have the private attributes we use

SHELL := /bin/bash
MAKEFLAGS += --no-builtin-rules
VENV := .venv
PYTHON := $(VENV)/bin/python
# One thread per worker, so that tests do not depend on the number of cores. All tests of a file run in the same worker
# (--dist loadfile), because they share runs.
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PYTHON) -m pytest --numprocesses auto --dist loadfile
LAUNCH = $(VENV)/bin/accelerate launch --config_file accelerate_configs/zero1.yaml
# If torch is already installed (for example in a pod image, built for its driver), use it: let the environment see the
# system's packages.
SYSTEM_TORCH = $(shell python3 -c "import torch" 2>/dev/null && echo --system-site-packages)

# uv installs faster than pip. With an installed torch, pip is used, because it sees the system's packages.
UV = $(if $(SYSTEM_TORCH),,$(shell command -v uv))
VENV_COMMAND = $(if $(UV),uv venv --quiet --seed --allow-existing --python python3,python3 -m venv $(SYSTEM_TORCH))
INSTALL = $(if $(UV),uv pip install --quiet --python $(PYTHON),$(PYTHON) -m pip install --quiet --disable-pip-version-check)

.PHONY: help demo test tests test-all test-faults test-chaos upgrade-check style quality
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/,/^$$/s/^# //p' Makefile

$(VENV)/.installed: requirements.txt
	$(VENV_COMMAND) $(VENV)
	$(INSTALL) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(INSTALL) -r requirements-dev.txt
	@touch $@

# A finished demo is only reported again. An interrupted demo is resumed.
demo: $(VENV)/.installed
	@if [[ -n "$(FRESH)" ]]; then rm -rf runs/demo; fi
	@if [[ ! -f runs/demo/evaluation/comparison.json ]]; then $(MAKE) --no-print-directory runs/demo/evaluation/comparison.json; fi
	@$(PYTHON) -m gpt2_repro.report runs/demo
	@echo "Next steps:"
	@echo "  train on your own text:  $(PYTHON) prepare_data.py recipes/own_text.yaml --data_files YOUR_FILE_OR_FOLDER"
	@echo "  reproduce GPT-2:         $(PYTHON) -m gpt2_repro.preflight --gpu list  # hours and dollars; see README.md"

runs/demo/evaluation/comparison.json:
	$(PYTHON) prepare_data.py recipes/demo.yaml
	@read -r kind processes cores < <($(PYTHON) -c "from gpt2_repro import hardware as h; print(h.find_accelerator().kind, h.demo_processes(), h.cpu_cores())"); \
	command=($(LAUNCH) --num_processes $$processes); \
	if [[ "$$(uname)" != Linux ]]; then echo "DeepSpeed needs Linux. Training with one process without DeepSpeed."; command=($(PYTHON)); fi; \
	if [[ $$kind == cpu ]]; then export DS_ACCELERATOR=cpu OMP_NUM_THREADS=$$(( (cores + processes - 1) / processes )); fi; \
	command+=(train.py recipes/demo.yaml); \
	if (( processes > 2 )); then command+=(--per_device_train_batch_size $$((8 / processes))); fi; \
	echo "$${command[@]}"; "$${command[@]}"
	PYTHON=$(PYTHON) bash evaluate.sh runs/demo/final --local_data data/demo > /dev/null  # the scores are printed by the report

style: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quality: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/shellcheck $$(git ls-files '*.sh') .ci/run
	$(VENV)/bin/mypy

tests: test
test: quality
	$(PYTEST)

test-all: test
	$(PYTEST) -m "slow and not faults and not chaos"
	FUZZ_CASES=1000 $(PYTEST) tests/test_fuzz.py
	$(MAKE) --no-print-directory test-faults test-chaos

test-faults: $(VENV)/.installed-dev
	$(PYTEST) -m faults

test-chaos: $(VENV)/.installed-dev
	$(PYTEST) --numprocesses 0 -m chaos

upgrade-check:
	python3 -m venv --clear $(SYSTEM_TORCH) .venv-upgrade
	.venv-upgrade/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	.venv-upgrade/bin/python -m pip install --quiet --disable-pip-version-check --upgrade transformers accelerate deepspeed
	.venv-upgrade/bin/python -m pytest tests/test_upstream_contract.py
