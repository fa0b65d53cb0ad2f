"""Who may use the worker: tokens and permissions, judged by Kubernetes and remembered a while."""
