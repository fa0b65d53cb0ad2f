"""Chaos: what consumers of every kind see while workers are killed, frozen and robbed (G3, G4, G5).

schedule   what happens when, from a seed                                          (pure)
history    what was produced, delivered, acknowledged, and which promise it breaks (pure)
people     producers and consumers
clients    consumers of the Python client
meddling   the store goes away, somebody else works on the table
run        the workers, the events, the quiet end
"""
