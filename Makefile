# make train: the main job.  make test: the tests.  Both set everything up themselves.
PYTHON ?= python3
TASK ?= memory_maze_9x9
CORE ?= s3m
ARGS ?=

.PHONY: train test lint

train: .venv/ready
	.venv/bin/python -m agent.train --task $(TASK) --core $(CORE) $(ARGS)

test: .venv/ready
	.venv/bin/python -m pytest

lint: .venv/ready
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

.venv/ready: setup.cfg pyproject.toml launch/setup.sh
	bash launch/setup.sh $(PYTHON)
	touch $@
