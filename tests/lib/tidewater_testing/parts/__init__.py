"""The real parts that tests run against: an Iceberg REST catalog, SeaweedFS, workers, small disks."""
