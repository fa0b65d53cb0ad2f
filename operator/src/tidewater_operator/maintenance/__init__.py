"""Spark jobs over tables: when one is due, what it is, what became of it."""
