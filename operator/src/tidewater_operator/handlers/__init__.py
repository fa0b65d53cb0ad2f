"""What kopf calls: each handler marks a namespace, and nothing else."""
