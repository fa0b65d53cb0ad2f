"""What is sent: messages that look like events, the same in every run.

The text is compressible as real events are (field names repeat, values do not), and batches
differ from each other, so that neither a compressor nor a cache sees the same bytes again.
"""

import random
from typing import Final

import pyarrow as pa

from tidewater import wire
from tidewater.wire import Message

SEED: Final = 20260101
FIELDS: Final = (
    '{{"order":{order:012d},"customer":"c{customer:06d}","amount":{amount:08.2f},"note":"'
)


def messages(count: int, size: int, seed: int = SEED) -> list[bytes]:
    """Return `count` messages of exactly `size` bytes."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        head = FIELDS.format(
            order=source.randrange(10**12),
            customer=source.randrange(10**6),
            amount=source.random() * 10_000,
        )
        fill = size - len(head) - 2
        assert fill >= 0, "messages are at least as long as their fields"
        note = source.getrandbits(4 * fill).to_bytes((fill + 1) // 2 + 1, "big").hex()[-fill:]
        found.append((head + (note if fill else "") + '"}').encode())
    assert all(len(m) == size for m in found)
    return found


def bodies(kind: str, batches: int, rows: int, size: int, seed: int = SEED) -> list[bytes]:
    """Return the bodies of `batches` different requests of `rows` messages each."""
    found = []
    for number in range(batches):
        values = messages(rows, size, seed + number)
        if kind == wire.ARROW:
            batch = pa.record_batch({"value": pa.array(values, pa.binary())})
            found.append(wire.arrow_body(batch))
        elif kind == wire.NDJSON:
            found.append(wire.encode_ndjson(Message(v) for v in values))
        else:
            found.append(wire.encode_json(Message(v) for v in values))
    return found
