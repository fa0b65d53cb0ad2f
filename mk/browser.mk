.PHONY: test-browser
test-browser: setup ## Run the page of docs/websocket.md in a real browser (needs chromium)
	@$(BIN)/python -m pytest tests/browser_by_hand.py -q
