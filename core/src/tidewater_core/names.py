"""Every name that crosses a boundary, once: columns, property keys, labels, paths.

A name here is part of a format that others read (tables, log directories, manifests): changing
one is a migration.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidewater_core.errors import Invalid

GROUP: Final = "tidewater.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# Columns of a topic's table and log.
RESERVED_PREFIX: Final = "tw_"
TW_PARTITION: Final = "tw_partition"
TW_OFFSET: Final = "tw_offset"
TW_TIME: Final = "tw_time"
TW_KEY: Final = "tw_key"
TW_HEADERS: Final = "tw_headers"
TW_PRODUCER: Final = "tw_producer"
"""In the log only: who sent a row, so that a re-sent batch is known after a restart."""
TW_UNSYNCED: Final = "tw_unsynced"
"""In the log only: how many messages before its frame were perhaps not on the disk yet."""
LOG_ONLY: Final = (TW_PRODUCER, TW_UNSYNCED)
VALUE: Final = "value"
"""The payload of a raw topic; typed topics have their own columns instead."""

# Keys of table properties and of snapshot summaries.
RESERVED_PROPERTY_PREFIX: Final = "tidewater."
COMMIT_ID: Final = "tidewater.commit-id"
TOPIC_UUID: Final = "tidewater.topic-uuid"
TOPIC: Final = "tidewater.topic"
IMPORT_PREFIX: Final = "tidewater.import."
REPLAY_PREFIX: Final = "tidewater.replay."
"""Of the properties that remember how far an import or replay is, by its id or what it reads."""
ORPHANS_AT: Final = "tidewater.maintenance.orphans-at-ms"
"""When `maintain`, which alone writes it, last looked for files that nothing names."""
HOLD: Final = "tidewater.hold"
"""Which snapshots an upkeep job needs while it is at work; those jobs alone write it."""
_FRONTIER_PREFIX: Final = "tidewater.partition."
_START_PREFIX: Final = "tidewater.start."
_GAP_PREFIX: Final = "tidewater.gap."

# Labels and annotations of Kubernetes objects.
LABEL_TOPIC: Final = f"{GROUP}/topic"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
ANNOTATION_PAUSED: Final = f"{GROUP}/paused"
"""`"true"`: the operator leaves this object alone."""
ANNOTATION_ACCEPT_LOSS: Final = f"{GROUP}/accept-loss"
"""Names the partitions whose volume is lost for good; they go on past a recorded gap."""
ANNOTATION_MAINTAIN: Final = f"{GROUP}/maintain"
"""Any new value: start the Spark jobs of this topic now."""
ANNOTATION_LEFTOVER: Final = f"{GROUP}/leftover-log"
"""Of a volume's claim: which logs on it may have messages that are nowhere else. The operator never
deletes such a volume; a person takes the annotation away."""
LABEL_MADE_BY: Final = f"{GROUP}/made-by"
"""`operator`: a pool that no person asked for; it goes when no topic needs it."""

LABEL_CHARS_MAX: Final = 63
POOL_NAME_CHARS_MAX: Final = 40
"""Pod names (`tidewater-<pool>-<number>`) are host names, which end at 63 characters."""
POOL_WORKERS_ENDING: Final = "-workers"
"""Of the Service `tidewater-<pool>-workers`, which a pool `<pool>-workers` would have for its own:
no pool's name ends so."""
DEDICATED_CHARS_MAX: Final = POOL_NAME_CHARS_MAX - len("topic-")
"""Of a topic's name in its pool's."""
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_LABEL_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


def frontier_property(partition: int) -> str:
    """Key of a partition's frontier: `{"next": …, "epoch": …}`, written by its owner alone."""
    return f"{_FRONTIER_PREFIX}{partition}"


def start_property(partition: int) -> str:
    """Key of a partition's first kept offset, written by retention alone."""
    return f"{_START_PREFIX}{partition}"


def gap_property(partition: int) -> str:
    """Key of a partition's gaps: offsets that were lost with a volume that a person gave up."""
    return f"{_GAP_PREFIX}{partition}"


def partition_of_gap(key: str) -> int | None:
    """Return the partition whose gaps this property is; None for any other property."""
    return _number_after(_GAP_PREFIX, key)


def partition_of_frontier(key: str) -> int | None:
    """Return the partition whose frontier this property is; None for any other property."""
    return _number_after(_FRONTIER_PREFIX, key)


def partition_of_start(key: str) -> int | None:
    """Return the partition whose first kept offset this property is; None for any other."""
    return _number_after(_START_PREFIX, key)


def _number_after(prefix: str, key: str) -> int | None:
    digits = key.removeprefix(prefix)
    return int(digits) if digits != key and digits.isascii() and digits.isdigit() else None


def is_dns_label(text: str) -> bool:
    """Say if text can be the name of a Kubernetes object that becomes a label."""
    return _DNS_LABEL.fullmatch(text) is not None


def dns_label_problem(what: str, text: str) -> str:
    """Say what is wrong with a name, for a person."""
    return (
        f"{what} {text[:80]!r} must be 1 to {LABEL_CHARS_MAX} characters of a-z, 0-9 and '-', "
        "and begin and end with a letter or digit"
    )


@dataclass(frozen=True, order=True, slots=True)
class TopicName:
    """A topic's full name, written `namespace/name`."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        """Refuse what could not be a Kubernetes name (or would escape a directory)."""
        for what, text in (("namespace", self.namespace), ("topic name", self.name)):
            if not is_dns_label(text):
                raise Invalid("InvalidTopicName", dns_label_problem(what, text))

    @classmethod
    def parse(cls, text: str) -> "TopicName":
        """Read `namespace/name`."""
        namespace, slash, name = text.partition("/")
        if not slash:
            raise Invalid("InvalidTopicName", f"topic {text[:80]!r} must be written namespace/name")
        return cls(namespace, name)

    def __str__(self) -> str:
        """Write `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def table_identifier(self) -> tuple[str, str]:
        """The table of this topic unless its spec names another.

        Both parts use only a-z, 0-9 and '-', which every catalog takes; some take no more.
        """
        return (self.namespace, self.name)


def dedicated_pool(topic: str) -> str:
    """Return the pool of a topic that has workers of its own."""
    plain = f"topic-{topic}"
    if len(topic) <= DEDICATED_CHARS_MAX and not plain.endswith(POOL_WORKERS_ENDING):
        return plain
    # Two long names that begin alike must not share a pool.
    digest = hashlib.sha256(topic.encode()).hexdigest()[:8]
    return f"topic-{topic[: DEDICATED_CHARS_MAX - 9].rstrip('-')}-{digest}"


def topic_path(root: Path, topic: TopicName) -> Path:
    """Return the directory that holds the logs of a topic's partitions."""
    return root / topic.namespace / topic.name


def log_path(root: Path, topic: TopicName, partition: int) -> Path:
    """Return the log directory of a partition: `<root>/<namespace>/<topic>/<partition>`."""
    return topic_path(root, topic) / str(partition)
