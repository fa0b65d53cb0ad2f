"""Subcommands that the worker adds to `tidewater`."""
