# Spark has an environment of its own: PySpark is 450 MB and few need it. Development (.venv made by
# `make setup`) has it, too.

.PHONY: setup-pipeline
setup-pipeline: ## Make .venv-pipeline with PySpark and add `tidewater compact` (once)
	@$(PYTHON) tools/setup.py run
	@test -x .venv-pipeline/bin/python || $(BIN)/python -m venv .venv-pipeline
	@echo '*' >.venv-pipeline/.gitignore
	@.venv-pipeline/bin/python -m pip install --quiet --require-hashes -r requirements/pipeline.txt
	@.venv-pipeline/bin/python -m pip install --quiet --no-deps --editable core --editable pipeline
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@$(BIN)/python -m pip install --quiet --no-deps --editable pipeline

.PHONY: compact
compact: setup-pipeline ## Compact a topic of `make run` with Spark (TOPIC=default/quickstart)
	@$(BIN)/tidewater compact $(or $(TOPIC),default/quickstart) --data $(DATA) $(COMPACT_ARGS)
