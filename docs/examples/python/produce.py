"""Send messages: one by one, in a batch, and as they come (batches form by themselves)."""

import sys

from tidewater import Client, Message


def main(url: str) -> None:
    """Send five hundred and three orders."""
    with Client(url) as client, client.producer("demo/orders") as producer:
        ack = producer.send(b'{"order": 1}', key="alice")
        print(f"stored in partition {ack.partition} at offset {ack.offset}")

        batch = [Message({"order": n}, key=name) for n, name in ((2, "bob"), (3, "alice"))]
        print(f"stored {sum(a.count for a in producer.send_many(batch).acks)} in one request")

        futures = [producer.post({"order": n}, key=f"customer-{n % 7}") for n in range(4, 504)]
        producer.flush()
        print(f"posted {len(futures)}; the last is at offset {futures[-1].result().offset}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
