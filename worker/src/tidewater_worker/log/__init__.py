"""The write-ahead log: segments of Arrow batches, one directory per partition."""
