"""Metrics in the Prometheus text format, written from what the node knows anyway."""

from collections.abc import Iterator

from tidewater_worker.node import Node

_HELP = {
    "tidewater_messages_total": "counter Messages acknowledged.",
    "tidewater_request_bytes_total": "counter Bytes of produce requests.",
    "tidewater_requests_total": "counter Produce requests.",
    "tidewater_request_errors_total": "counter Produce requests that failed in the log.",
    "tidewater_log_end_offset": "gauge The next message's offset.",
    "tidewater_durable_offset": "gauge Offsets below this are fsynced.",
    "tidewater_committed_offset": "gauge Offsets below this are in the table.",
    "tidewater_uncommitted_messages": "gauge Messages that are in the log but not in the table.",
    "tidewater_log_bytes": "gauge Bytes of segments.",
    "tidewater_log_sync_seconds": "gauge Recent write and fdatasync time of a group, by quantile.",
    "tidewater_partition_open": "gauge 1 if the partition takes messages.",
    "tidewater_inflight_bytes": "gauge Bytes of requests that wait for the log.",
    "tidewater_table_process_up": "gauge 1 if the table process is connected.",
}


def _samples(node: Node) -> Iterator[tuple[str, str, float]]:
    yield "tidewater_inflight_bytes", "", node.inflight_bytes
    yield "tidewater_table_process_up", "", float(node.link.is_connected)
    for topic in node.topics.values():
        labels = f'namespace="{topic.name.namespace}",topic="{topic.name.name}"'
        yield "tidewater_messages_total", labels, topic.counters["messages"]
        yield "tidewater_request_bytes_total", labels, topic.counters["bytes"]
        yield "tidewater_requests_total", labels, topic.counters["requests"]
        yield "tidewater_request_errors_total", labels, topic.counters["errors"]
        for number, partition in topic.partitions.items():
            one = f'{labels},partition="{number}"'
            is_open = partition.is_open and partition.refusal is None
            yield "tidewater_partition_open", one, float(is_open)
            yield "tidewater_committed_offset", one, partition.table.next
            if (appender := partition.appender) is None:
                continue
            yield "tidewater_log_end_offset", one, appender.end
            yield "tidewater_durable_offset", one, appender.durable_end
            uncommitted = max(appender.end - partition.table.next, 0)
            yield "tidewater_uncommitted_messages", one, uncommitted
            size = sum(segment.index.size for segment in appender.segments)
            yield "tidewater_log_bytes", one, size
            for name, value_ms in appender.latencies.quantiles_ms().items():
                quantile = f'{one},quantile="0.{name[1:]}"'
                yield "tidewater_log_sync_seconds", quantile, value_ms / 1000


def render(node: Node) -> str:
    """Write all metrics."""
    families: dict[str, list[str]] = {}
    for name, labels, value in _samples(node):
        text = f"{name}{{{labels}}}" if labels else name
        families.setdefault(name, []).append(
            f"{text} {value:g}" if value % 1 else f"{text} {int(value)}"
        )
    lines = []
    for name, samples in families.items():
        kind, _, text = _HELP[name].partition(" ")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
    return "\n".join(lines) + "\n"
