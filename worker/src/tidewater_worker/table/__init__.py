"""The table side: everything that uses pyiceberg. The only way out of here is `ports`."""
