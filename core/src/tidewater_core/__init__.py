"""What every component shares: models, names, errors, settings. Pure: no I/O and no clock."""
