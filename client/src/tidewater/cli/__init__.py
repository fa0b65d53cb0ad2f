"""The `tidewater` command."""
