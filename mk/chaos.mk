CHAOS_MINUTES ?= 10
.PHONY: chaos
chaos: setup ## Kill, freeze and rob three workers, their store and their table for CHAOS_MINUTES (10), and check G3 to G5 (CHAOS_ARGS="--seed 7")
	@PYTHONPATH=tests/lib $(BIN)/python -m tidewater_testing.chaos --minutes $(CHAOS_MINUTES) $(CHAOS_ARGS)
