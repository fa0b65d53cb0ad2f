"""Subscriptions: who gets which message, when again, and what has been acknowledged (G4).

cursor       what is acknowledged: a contiguous offset and ranges beyond it   (pure)
delivery     one partition's messages between fetched and acknowledged        (pure)
keyshared    which consumer a key or partition belongs to                     (pure)
members      which consumers there are                                        (pure)
ackid        the text that a consumer acknowledges with                       (pure)
filtering    which messages a subscription wants
window       fetches messages, in bounded memory
store        progress into the coordination store, by group commit
starting     where a subscription begins
subscription pull, ack, nack, extend, seek of one subscription
deadletter   messages that were delivered too often, and their way back
manager      all subscriptions of a worker, kept like the registry
"""
