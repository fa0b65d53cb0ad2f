.PHONY: bench-quick
bench-quick: setup ## The same as bench in about two minutes, with fewer samples
	@$(BIN)/python -m bench --quick $(BENCH_ARGS)
