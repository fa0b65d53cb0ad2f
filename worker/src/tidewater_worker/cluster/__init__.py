"""Several workers as one: who takes which partition, and how a request finds its owner.

plan        what to do about a partition        (pure)
owning      taking, draining and letting go
http        pooled HTTP between workers
forwarding  requests for what another worker has
"""
