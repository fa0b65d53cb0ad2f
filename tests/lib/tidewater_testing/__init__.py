"""What the tests share: real parts as processes, traffic that records its acks, the checker."""
