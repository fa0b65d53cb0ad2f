"""The Spark jobs: data-heavy work over a table's history."""
