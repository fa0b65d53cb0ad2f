"""Take messages of a subscription until none has come for two seconds."""

import sys

from tidewater import Client, ConsumerOptions


def main(url: str) -> None:
    """Print how many orders there were."""
    count = 0
    with (
        Client(url) as client,
        client.consumer("demo/orders", "billing", ConsumerOptions(prefetch=200)) as consumer,
    ):
        while (message := consumer.receive(timeout_s=2)) is not None:
            if message.attempt > 3:
                print(f"offset {message.offset} fails again and again: {message.value!r}")
            count += 1
            message.ack()
    print(f"billed {count} orders")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
