# `make` lists the targets. Each first builds $(VENV) from requirements.lock when it is missing or older than its sources.
#
#   make test PYTHON=python3 VENV=    use an interpreter that has every package; install nothing, need no network
#   make bench VARIANT=baseline AGAINST=mamba_ssm SHAPE=8b-b4,2.7b-b4 MODE=fwd,bwd ARGS='--repeats 100'
#   make ablate SHAPE=8b-b1,8b-b4 MODE=fwd   every option of fused and persistent; VARIANT=fused for one
#   make ablate WORKLOAD=mamba2:1.3b,hybrid:1b   step times and losses with each variant inside
#   make block PART=conv1d,block SHAPE=8b-b4   what surrounds the operator, beside upstream's where that is installed
#   make decode PRESET=130m,2.7b BATCH=1,64   generation: prompts, and ms a token
#   make train WORKLOAD=hybrid VARIANT=fused PRESET=1b STEPS=1000 ARGS='--dtype bf16'
#   make characterize WORKLOAD=mamba2:1.3b VARIANT=fused   what training steps spend their time on; scaling; the report
#   make scaling ARGS='--seqlen 64,1024'   the components of a Mamba-1 and a Mamba-2 block over the sequence length
#   make prune WORKLOAD=mamba2:130m RATIO=0.125,0.25,0.5   losses without the least active states; ARGS='--kind heads'
#   make train GPUS=2 PARALLEL=fsdp PRESET=1.3b   two processes by torchrun
#   make export FROM=runs/mamba2-130m-ssd-auto-0 TO=weights   the trained model, for generation and other programs
#   make fuzz SECONDS=500 SEED=7 VARIANT=fused,persistent   configurations drawn at random, judged against fp64
#   make test ARGS='tests/ssd -k cost'
#   make test ARGS='--numprocesses=14 --shard=2/3'   the second of three parts of the tests, on 14 cores
#   make test TRITON=all    compile everything, with every version of Triton; TRITON=3.8.0,3.9.0 with some

PYTHON ?= python3
VENV ?= .venv
VARIANT ?= baseline

# what may be given as NAME=value; anything else there is a mistake, or belongs before `make`, in the environment
KNOWN := AGAINST ARGS BATCH FROM GPUS MODE PARALLEL PART PRESET PYTHON RATIO SECONDS SEED SHAPE STEPS TO TRITON VARIANT VENV \
  WORKLOAD
UNKNOWN := $(filter-out $(KNOWN),$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
$(if $(UNKNOWN),$(error $(UNKNOWN): expected any of $(KNOWN)))

ifeq ($(VENV),)
PY := $(PYTHON)
READY :=
TRITONS :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
TRITONS := tritons
endif
PYTEST = $(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=2 --maxschedchunk=4)

RUN := @$(PY) -m experiments
with = $(if $($(1)),--$(2) $($(1)))
given = $(if $(filter-out file,$(origin VARIANT)),--variant $(VARIANT))

.DEFAULT_GOAL := help
.PHONY: help setup peers tritons bench ablate block patches decode train export prune prune-speed table readme characterize \
  scaling report tune choose sanitize fuzz test coverage lint dist

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables and examples are at the top of the Makefile; ARGS=--help shows every option of a command."

setup: $(READY)  ## Build the virtual environment; every other target does so when it is missing

$(VENV)/.installed: requirements.lock pyproject.toml setup.cfg
	@echo "installing the packages of requirements.lock in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
	@$(PY) -m experiments.setup_size

# mamba_ssm only matters where it can run. Its Triton kernels need no CUDA build, so that build is skipped.
peers: $(READY)
ifneq ($(VENV),)
	@if nvidia-smi -L >/dev/null 2>&1 && ! $(PY) -m pip show --quiet mamba-ssm 2>/dev/null; then \
	  MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(PY) -m pip install --disable-pip-version-check \
	    --no-deps --no-build-isolation mamba-ssm==2.3.2.post1 \
	  || echo "mamba-ssm could not be installed: the bench runs without it"; \
	fi
endif

# Versions of Triton that kernels are compiled with as well (tools/tritons.py); what cannot be had is skipped by its tests.
tritons: $(READY)
	@$(PY) -m tools.tritons $(TRITON)

bench: peers  ## Measure variants side by side; without a GPU check them and show costs
	$(RUN) bench --variant $(VARIANT) $(call with,AGAINST,against) $(call with,SHAPE,shape) $(call with,MODE,mode) $(ARGS)

ablate: peers  ## Measure what each option of a variant is worth; WORKLOAD= for variants inside training steps
	$(RUN) $(if $(WORKLOAD),sweep --workload $(WORKLOAD),ablate) $(given) $(call with,SHAPE,shape) $(call with,MODE,mode) $(ARGS)

block: peers  ## Measure what surrounds the operator, and whole blocks, beside upstream's
	$(RUN) block $(call with,PART,part) $(call with,SHAPE,shape) $(call with,MODE,mode) $(ARGS)

patches: peers  ## Measure layers of transformers' models under the patch, beside mamba_ssm's kernels
	$(RUN) patches $(given) $(call with,MODE,mode) $(ARGS)

decode: peers  ## Measure generation by models of random weights, beside mamba_ssm's and transformers'
	$(RUN) decode $(call with,PRESET,preset) $(call with,BATCH,batch) $(given) $(ARGS)

train: $(READY)  ## Train a workload; GPUS=2 for two processes
	@case '$(GPUS)' in ''|[1-9]|[1-9][0-9]) ;; *) echo 'error: GPUS: got $(GPUS), expected 1 to 99' >&2; exit 2 ;; esac
	@$(if $(GPUS),$(PY) -m torch.distributed.run --standalone --nproc-per-node $(GPUS) -m experiments,$(PY) -m experiments) train \
	  $(call with,PARALLEL,parallel) $(call with,WORKLOAD,workload) $(call with,PRESET,preset) $(given) $(call with,STEPS,steps) $(ARGS)

export: $(READY)  ## Write a trained mamba2 as Mamba2LM.from_pretrained reads it
	$(RUN) export $(call with,FROM,from) $(call with,TO,to) $(ARGS)

prune: $(READY)  ## Remove a workload's least active states, bridge, fine-tune, and record the losses
	$(RUN) prune $(call with,WORKLOAD,workload) $(call with,RATIO,ratio) $(given) $(call with,STEPS,steps) $(ARGS)

prune-speed: $(READY)  ## Measure time and memory of pruned blocks, models and training steps
	$(RUN) prune-speed $(call with,WORKLOAD,workload) $(call with,RATIO,ratio) $(given) $(ARGS)

table: $(READY)  ## Print the latest rows with every column, in Markdown, CSV or LaTeX
	$(RUN) table $(ARGS)

readme: $(READY)  ## Write the tables and figures of README and docs from committed rows
	$(RUN) readme $(ARGS)

characterize: $(READY)  ## Profile training steps, measure scaling, write the report
	@# one workload that cannot run costs neither what comes after nor the exit status
	$(RUN) characterize $(call with,WORKLOAD,workload) $(given) $(ARGS); complete=$$?; \
	$(PY) -m experiments scaling && $(PY) -m experiments report && exit $$complete

scaling: $(READY)  ## Measure the components of a Mamba block over the sequence length
	$(RUN) scaling $(ARGS)

report: $(READY)  ## Write docs/characterisation from committed rows; needs no GPU
	$(RUN) report $(ARGS)

tune: $(READY)  ## Freeze the fastest config of each kernel on this GPU
	$(RUN) tune $(ARGS)

choose: $(READY)  ## Write what variant "auto" chooses by, from committed rows
	$(RUN) choose $(ARGS)

sanitize: $(READY)  ## Run every kernel under compute-sanitizer
	$(RUN) sanitize $(ARGS)

fuzz: $(READY)  ## Judge configurations drawn at random against fp64
	$(RUN) fuzz $(call with,SECONDS,seconds) $(call with,SEED,seed) $(given) $(call with,PART,part) $(ARGS)

# What Python compiles is kept, for workers and the processes that tests start, in the environment.
test coverage: export PYTHONDONTWRITEBYTECODE :=
test coverage: export PYTHONPYCACHEPREFIX := $(if $(VENV),$(abspath $(VENV))/pycache)

test: $(READY) $(TRITONS)  ## Run the tests; the kernels are interpreted where there is no GPU
	@$(PYTEST) $(call with,TRITON,triton) $(ARGS)

coverage: $(READY)  ## Run the tests and demand that they cover 90 % of ssd
	@$(PYTEST) --cov=ssd --cov-fail-under=90 $(ARGS)

lint: $(READY)  ## Check the style with ruff
	@$(PY) -m ruff check .

dist: $(READY)  ## Build the wheel and the source archive in dist/ and check them
	@$(PY) -m build --quiet --no-isolation --outdir dist
	@$(PY) -m twine check --strict dist/*
