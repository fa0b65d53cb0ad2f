# Spark has an environment of its own: PySpark is 450 MB and few need it. Development (.venv made by
# `make setup`) has it, too.

.PHONY: setup-pipeline
setup-pipeline: ## Make .venv-pipeline with PySpark for `tidewater compact` (once)
	@$(PYTHON) tools/setup.py run
	@$(PYTHON) tools/setup.py pipeline

.PHONY: compact
compact: setup-pipeline ## Compact a topic of `make run` (TOPIC=default/quickstart COMPACT_ARGS=)
	@$(BIN)/tidewater compact $(or $(TOPIC),default/quickstart) --data $(DATA) $(COMPACT_ARGS)

MINUTES ?= 20

.PHONY: soak
soak: setup ## Produce, read, compact and kill for a while; plot into docs/ (MINUTES=20)
	@PYTHONPATH=tests/lib $(BIN)/python -m tools.soak --minutes $(MINUTES)

.PHONY: bench-compact
bench-compact: setup ## Compaction next to plain rewrite_data_files on the same table
	@$(BIN)/python -m tools.bench_compact
