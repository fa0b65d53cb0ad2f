"""A service on asyncio: eight orders at a time, and a graceful end on SIGTERM or Ctrl-C."""

import asyncio
import json
import signal
import sys

from tidewater import AsyncClient, ConsumerOptions, Delivery


async def ship(message: Delivery) -> None:
    """Do the work; what raises is given back and comes again after the backoff."""
    order = json.loads(message.value)
    await asyncio.sleep(0.002)
    print(f"shipped order {order['order']} of {(message.key or b'').decode()}", flush=True)


async def main(url: str) -> None:
    """Run until somebody says stop."""
    async with AsyncClient(url) as client:
        options = ConsumerOptions(prefetch=50)
        consumer = client.consumer("demo/orders", "warehouse", options)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, consumer.stop)
        await consumer.run(ship, concurrency=8)
        # Acks are stored, and what was fetched and not begun goes to others at once.
        await consumer.close()
        print(f"{consumer.tally.acked} orders are done")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"))
