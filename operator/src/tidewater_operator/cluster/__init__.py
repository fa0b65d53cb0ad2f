"""The only users of the Kubernetes API."""
