"""From a Pool's spec to the manifests of its workers. Pure."""
