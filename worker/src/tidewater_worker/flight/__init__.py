"""Arrow Flight: the same messages as over HTTP, without a copy into another format."""
