AZURITE := azurite@3.35.0
AZURITE_HOME := .cache/azurite

.PHONY: test-azure
test-azure: setup ## Run a worker on Azure's blob storage by azurite (needs Node and npm)
	@test -d $(AZURITE_HOME)/node_modules/azurite || npm install --silent --no-fund --no-audit --prefix $(AZURITE_HOME) $(AZURITE)
	@TIDEWATER_AZURITE=$(CURDIR)/$(AZURITE_HOME)/node_modules/azurite/dist/src/blob/main.js \
		$(BIN)/python -m pytest tests/azure_by_hand.py -q
