"""The commands: `tidewater-pipeline`, and `tidewater compact` for embedded use."""
