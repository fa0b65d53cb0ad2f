"""The worker: the log and its HTTP edge in one process, the Iceberg table in another."""
