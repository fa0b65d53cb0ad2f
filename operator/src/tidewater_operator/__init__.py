"""The Kubernetes operator: reads Topics and Subscriptions, keeps workers and tables as they say."""
