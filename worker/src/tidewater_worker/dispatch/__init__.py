"""Subscriptions: who gets which message, when again, and what has been acknowledged (G4).

cursor       what is acknowledged: a contiguous offset and ranges beyond it   (pure)
delivery     one partition's messages between fetched and acknowledged        (pure)
policy       how a subscription delivers                                       (pure)
keyshared    which consumer a key or partition belongs to                     (pure)
members      which consumers there are                                        (pure)
ackid        the text that a consumer acknowledges with                       (pure)
window       fetches messages, in bounded memory
idle         memory given back when nobody pulls
bell         waking up consumers when a topic has news
store        progress into the coordination store, by group commit
opening      partitions that a subscription is served from here
starting     where a subscription begins
subscription pull, ack, nack, extend, seek of one subscription
spread       the same over all workers that have its partitions
deadletter   messages that were delivered too often, and their way back
manager      all subscriptions of a worker, kept like the registry
"""
