# Every target first builds $(VENV) from requirements.lock when it is missing or older than what it is built from.
#
#   make test PYTHON=python3 VENV=    uses an interpreter that is already equipped; installs nothing, needs no network
#   make bench VARIANT=baseline AGAINST=mamba_ssm SHAPE=8b-b4,2.7b-b4 MODE=fwd,bwd ARGS='--repeats 100'
#   make ablate SHAPE=8b-b1,8b-b4 MODE=fwd   every option of fused and persistent; VARIANT=fused for one
#   make ablate WORKLOAD=mamba2:1.3b,hybrid:1b   step times and losses with each variant inside
#   make block PART=conv1d,block SHAPE=8b-b4   what surrounds the operator, beside upstream's where that is installed
#   make train WORKLOAD=hybrid VARIANT=fused PRESET=1b STEPS=1000 ARGS='--dtype bf16'
#   make characterize WORKLOAD=mamba2:1.3b VARIANT=fused   what training steps spend their time on; scaling; the report
#   make scaling ARGS='--seqlen 64,1024'   the components of a Mamba-1 and a Mamba-2 block over the sequence length
#   make train GPUS=2 PARALLEL=fsdp PRESET=1.3b   two processes by torchrun
#   make fuzz SECONDS=500 SEED=7 VARIANT=fused,persistent   configurations drawn at random, judged against fp64
#   make test ARGS='tests/ssd -k cost'
#   make test ARGS='--numprocesses=14 --shard=2/3'   the second of three parts of the tests, on 14 cores
#   make test TRITON=all    the tests of compilation with every version of Triton; TRITON=3.8.0,3.9.0 with some

PYTHON ?= python3
VENV ?= .venv
VARIANT ?= baseline

ifeq ($(VENV),)
PY := $(PYTHON)
READY :=
TRITONS :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
TRITONS := tritons
endif

EXPERIMENTS := $(PY) -m experiments

.DEFAULT_GOAL := help
.PHONY: help setup peers tritons bench ablate block train table readme characterize scaling report tune choose sanitize fuzz test coverage lint dist

help:
	@echo "targets: setup bench ablate block train table readme characterize scaling report tune choose sanitize fuzz test coverage lint dist; see the top of the Makefile for their variables"

setup: $(READY)

$(VENV)/.installed: requirements.lock pyproject.toml setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# mamba_ssm only matters where it can run. Its Triton kernels need no CUDA build, so that build is skipped.
peers: $(READY)
ifneq ($(VENV),)
	@if nvidia-smi -L >/dev/null 2>&1 && ! $(PY) -m pip show --quiet mamba-ssm 2>/dev/null; then \
	  MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(PY) -m pip install --disable-pip-version-check \
	    --no-deps --no-build-isolation mamba-ssm==2.3.2.post1 \
	  || echo "mamba-ssm could not be installed: the bench runs without it"; \
	fi
endif

# Versions of Triton that kernels are compiled with as well (tests/tritons.py); what cannot be had is skipped by its tests.
tritons: $(READY)
	@$(PY) -m tests.tritons $(TRITON)

bench: peers
	$(EXPERIMENTS) bench --variant $(VARIANT) $(if $(AGAINST),--against $(AGAINST)) $(if $(SHAPE),--shape $(SHAPE)) \
	  $(if $(MODE),--mode $(MODE)) $(ARGS)

ablate: peers
	$(EXPERIMENTS) $(if $(WORKLOAD),sweep --workload $(WORKLOAD),ablate) \
	  $(if $(filter-out file,$(origin VARIANT)),--variant $(VARIANT)) \
	  $(if $(SHAPE),--shape $(SHAPE)) $(if $(MODE),--mode $(MODE)) $(ARGS)

block: peers
	$(EXPERIMENTS) block $(if $(PART),--part $(PART)) $(if $(SHAPE),--shape $(SHAPE)) $(if $(MODE),--mode $(MODE)) $(ARGS)

train: $(READY)
	$(if $(GPUS),$(PY) -m torch.distributed.run --standalone --nproc-per-node $(GPUS) -m experiments,$(EXPERIMENTS)) train \
	  $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(PRESET),--preset $(PRESET)) \
	  $(if $(filter-out file,$(origin VARIANT)),--variant $(VARIANT)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

table: $(READY)
	@$(EXPERIMENTS) table $(ARGS)

readme: $(READY)
	$(EXPERIMENTS) readme $(ARGS)

tune: $(READY)
	$(EXPERIMENTS) tune $(ARGS)

choose: $(READY)
	$(EXPERIMENTS) choose $(ARGS)

characterize: $(READY)
	@# one workload that cannot run costs neither what comes after nor the exit status
	$(EXPERIMENTS) characterize $(if $(WORKLOAD),--workload $(WORKLOAD)) \
	  $(if $(filter-out file,$(origin VARIANT)),--variant $(VARIANT)) $(ARGS); \
	complete=$$?; $(EXPERIMENTS) scaling && $(EXPERIMENTS) report && exit $$complete

scaling: $(READY)
	$(EXPERIMENTS) scaling $(ARGS)

report: $(READY)
	$(EXPERIMENTS) report $(ARGS)

sanitize: $(READY)
	$(EXPERIMENTS) sanitize $(ARGS)

fuzz: $(READY)
	$(EXPERIMENTS) fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(filter-out file,$(origin VARIANT)),--variant $(VARIANT)) $(if $(PART),--part $(PART)) $(ARGS)

test: $(READY) $(TRITONS)
	$(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=2) $(if $(TRITON),--triton $(TRITON)) $(ARGS)

coverage: $(READY)
	$(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=2) --cov=ssd --cov-fail-under=90 $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .

dist: $(READY)
	$(PY) -m build --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*
