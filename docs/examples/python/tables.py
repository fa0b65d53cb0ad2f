"""Arrow in and out. A pandas or polars DataFrame can stand wherever a table stands here."""

import sys

import pyarrow as pa
import pyarrow.compute as pc

from tidewater import Client


def main(url: str) -> None:
    """Send a table, read it back, and take a batch of a subscription."""
    readings = pa.table({"sensor": ["a", "b"] * 500, "value": [float(n) for n in range(1000)]})
    with Client(url) as client:
        produced = client.producer("demo/readings").send_table(readings)
        print(f"stored {sum(ack.count for ack in produced.acks)} rows")

        table = client.reader("demo/readings").read_table()
        print(f"read {table.num_rows} rows, mean {pc.mean(table.column('value')).as_py():.1f}")

        with client.consumer("demo/readings", "analysis") as consumer:
            rows = 0
            while (batch := consumer.receive_arrow(timeout_s=2)) is not None:
                rows += batch.to_arrow().num_rows
                batch.ack()
        print(f"took {rows} rows")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
