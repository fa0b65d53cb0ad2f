"""Metrics in the Prometheus text format, written from what the node knows anyway."""

from collections.abc import Iterator
from itertools import chain

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
    "tidewater_partition_refused": "gauge 1 while this worker's partition takes none, by reason.",
    "tidewater_inflight_bytes": "gauge Bytes of requests that wait for the log.",
    "tidewater_table_process_up": "gauge 1 if the table process is connected.",
    "tidewater_ready": "gauge 1 if the worker is ready.",
    "tidewater_log_disk_free_bytes": "gauge Free bytes of the log's disk.",
    "tidewater_session_left_seconds": "gauge How long the session is certainly live; 0: not.",
    "tidewater_sessions_opened_total": "counter Sessions; more than one means that some were lost.",
    "tidewater_session_renewals_failed_total": "counter Renewals without an answer.",
    "tidewater_partitions_owned": "gauge Partitions whose log is open here.",
    "tidewater_partitions_taken_total": "counter Partitions that were opened here.",
    "tidewater_partitions_drained_total": "counter Partitions that were drained and let go.",
    "tidewater_leftover_logs": "gauge Logs of deleted topics with messages that are not drained.",
    "tidewater_auth_reviews_total": "counter Answers about tokens and permissions, and failures.",
    "tidewater_partition_epoch": "gauge The epoch that the partition is owned with.",
    "tidewater_uncommitted_age_seconds": "gauge Age of the oldest message not in the table.",
    "tidewater_table_files": "gauge Data files of the table.",
    "tidewater_table_bytes": "gauge Bytes of its data files.",
    "tidewater_table_rows": "gauge Its rows.",
    "tidewater_table_small_files": "gauge Data files well below the target size.",
    "tidewater_table_debt_files": "gauge Small files that compaction would join now.",
    "tidewater_table_delete_files": "gauge Files of deleted rows that readers must apply.",
    "tidewater_table_manifests": "gauge Manifests of its snapshot.",
    "tidewater_table_snapshots": "gauge Snapshots that its metadata has.",
    "tidewater_subscription_backlog": "gauge Messages of this worker's partitions to be acked.",
    "tidewater_subscription_unacked": "gauge Messages that consumers hold.",
    "tidewater_subscription_oldest_seconds": "gauge Age of the oldest message that is not acked.",
    "tidewater_subscription_consumers": "gauge Consumers that are there.",
    "tidewater_subscription_redeliveries_total": "counter Deliveries after a message's first.",
    "tidewater_subscription_dead_letters_total": "counter Messages put into a dead-letter topic.",
}


Sample = tuple[str, str, float]
_TABLE = (
    "files", "bytes", "table_rows", "small_files", "debt_files", "delete_files", "manifests",
    "snapshots",
)  # fmt: skip
"""What is told of a table's health."""


def _worker(node: Node) -> Iterator[Sample]:
    yield "tidewater_inflight_bytes", "", node.inflight_bytes
    yield "tidewater_table_process_up", "", float(node.link.is_connected)
    yield "tidewater_ready", "", float(node.is_started and not node.is_draining)
    yield "tidewater_log_disk_free_bytes", "", node.disk_free_bytes
    yield "tidewater_session_left_seconds", "", max(node.session_left_s, 0.0)
    for name, count in node.session_counters.items():
        yield f"tidewater_{name}_total", "", count
    partitions = (p for topic in node.topics.values() for p in topic.partitions.values())
    yield "tidewater_partitions_owned", "", sum(p.appender is not None for p in partitions)
    yield "tidewater_partitions_taken_total", "", node.owning.taken
    yield "tidewater_partitions_drained_total", "", node.owning.drained
    yield "tidewater_leftover_logs", "", len(node.owning.leaving.leftovers)
    for result, count in node.review_counts.items():
        yield "tidewater_auth_reviews_total", f'result="{result}"', count


def _subscriptions(node: Node) -> Iterator[Sample]:
    for one in node.subscriptions():
        labels = (
            f'namespace="{one["namespace"]}",topic="{one["topic"]}",subscription="{one["name"]}"'
        )
        yield "tidewater_subscription_backlog", labels, one["backlog"]
        yield "tidewater_subscription_unacked", labels, one["unacked"]
        yield "tidewater_subscription_oldest_seconds", labels, one["oldest_unacked_ms"] / 1000
        yield "tidewater_subscription_consumers", labels, one["consumers"]
        yield "tidewater_subscription_redeliveries_total", labels, one["redeliveries"]
        yield "tidewater_subscription_dead_letters_total", labels, one["dead_lettered"]


def _topics(node: Node) -> Iterator[Sample]:
    now = node.clock.monotonic()
    for topic in node.topics.values():
        labels = f'namespace="{topic.name.namespace}",topic="{topic.name.name}"'
        yield "tidewater_messages_total", labels, topic.counters["messages"]
        yield "tidewater_request_bytes_total", labels, topic.counters["bytes"]
        yield "tidewater_requests_total", labels, topic.counters["requests"]
        yield "tidewater_request_errors_total", labels, topic.counters["errors"]
        for number, partition in topic.partitions.items():
            one = f'{labels},partition="{number}"'
            refused = partition.refused
            yield "tidewater_partition_open", one, float(partition.is_open and refused is None)
            if refused is not None and not partition.is_elsewhere:
                yield "tidewater_partition_refused", f'{one},reason="{refused.reason}"', 1.0
            yield "tidewater_committed_offset", one, partition.table.next
            if (appender := partition.appender) is None:
                continue
            yield "tidewater_partition_epoch", one, partition.epoch
            yield "tidewater_uncommitted_age_seconds", one, partition.pulse.oldest_s(now)
            yield "tidewater_log_end_offset", one, appender.end
            yield "tidewater_durable_offset", one, appender.durable_end
            uncommitted = max(appender.end - partition.table.next, 0)
            yield "tidewater_uncommitted_messages", one, uncommitted
            size = sum(segment.index.size for segment in appender.segments)
            yield "tidewater_log_bytes", one, size
            for name, value_ms in appender.latencies.quantiles_ms().items():
                quantile = f'{one},quantile="0.{name[1:]}"'
                yield "tidewater_log_sync_seconds", quantile, value_ms / 1000


def _tables(node: Node) -> Iterator[Sample]:
    """Every owner of some of a topic's partitions tells about its table: take the largest."""
    now = node.clock.monotonic()
    for topic in node.topics.values():
        if all(partition.is_elsewhere for partition in topic.partitions.values()):
            continue
        said = node.table_health.of(topic, now)
        labels = f'namespace="{topic.name.namespace}",topic="{topic.name.name}"'
        for name in _TABLE:
            if name in said:
                yield f"tidewater_table_{name.removeprefix('table_')}", labels, said[name]


def render(node: Node) -> str:
    """Write all metrics."""
    families: dict[str, list[str]] = {}
    for name, labels, value in chain(
        _worker(node), _topics(node), _tables(node), _subscriptions(node)
    ):
        text = f"{name}{{{labels}}}" if labels else name
        families.setdefault(name, []).append(
            f"{text} {value:g}" if value % 1 else f"{text} {int(value)}"
        )
    lines = []
    for name, told in families.items():
        kind, _, text = _HELP[name].partition(" ")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *told]
    return "\n".join(lines) + "\n"
