"""The Kubernetes kinds: models that manifests are read with and CRDs are generated from."""
