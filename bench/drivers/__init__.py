"""Clients of the measured systems, each a process of its own that takes orders on its stdin."""
