"""The real parts of the tests: an Iceberg REST catalog, SeaweedFS, workers, small disks."""
