"""The local socket between the edge and the table process."""
