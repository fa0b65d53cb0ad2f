"""Coordination in etcd.

wire      etcd's messages as bytes           (pure)
keys      where everything stands            (pure)
client    calls: failover, time limits
mirror    the registry in memory, by one watch
store     the port, by transactions
"""
