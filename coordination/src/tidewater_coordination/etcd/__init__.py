"""Coordination in etcd.

wire      etcd's messages as bytes           (pure)
keys      where everything stands, by prefix (pure)
login     certificates, user and password
client    calls: failover, time limits, tokens
mirror    the registry in memory, by one watch
store     the port, by transactions
"""
