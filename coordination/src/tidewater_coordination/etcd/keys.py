"""Where everything stands in etcd, below a prefix. Pure.

    <prefix>/meta/topics/<ns>/<name>               {"topic", "uuid", "spec", "phase"?, …}
    <prefix>/meta/subscriptions/<ns>/<name>        {"name", "uuid", "spec"}
    <prefix>/meta/assignments/<ns>/<topic>         {"<partition>": "<worker>"}
    <prefix>/meta/workers/<id>                     {"worker_id", "url", …}, on the session's lease
    <prefix>/meta/owners/<ns>/<topic>/<partition>  {"worker_id", "epoch", "volume", "session", …}
    <prefix>/leases/<name>                         the holder's id, on its session's lease
    <prefix>/jobs/<id>                             as a worker's, of a job that holds leases
    <prefix>/cursors/<ns>/<topic>/<ns>/<subscription>/<partition>

Everything below `meta` changes seldom and every worker follows it by one watch; cursors change
all the time and are read by the owner of their partition alone. A prefix of its own for each
Kubernetes namespace keeps its workers out of the others', by etcd's own permissions if they are
set (G9).
"""

from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "tidewater"


@dataclass(frozen=True)
class Keys:
    """The keys below one prefix."""

    prefix: str = PREFIX
    meta: str = field(init=False)
    topics: str = field(init=False)
    subscriptions: str = field(init=False)
    assignments: str = field(init=False)
    workers: str = field(init=False)
    all_owners: str = field(init=False)
    leases: str = field(init=False)
    jobs: str = field(init=False)
    all_cursors: str = field(init=False)

    def __post_init__(self) -> None:
        """Fill in the places."""
        root = self.prefix.strip("/")
        places = {
            "meta": f"{root}/meta/",
            "topics": f"{root}/meta/topics/",
            "subscriptions": f"{root}/meta/subscriptions/",
            "assignments": f"{root}/meta/assignments/",
            "workers": f"{root}/meta/workers/",
            "all_owners": f"{root}/meta/owners/",
            "leases": f"{root}/leases/",
            "jobs": f"{root}/jobs/",
            "all_cursors": f"{root}/cursors/",
        }
        for name, place in places.items():
            object.__setattr__(self, name, place)  # how a frozen dataclass computes its fields

    def topic(self, name: str) -> bytes:
        """Return the key of a topic."""
        return f"{self.topics}{name}".encode()

    def subscription(self, name: str) -> bytes:
        """Return the key of a subscription."""
        return f"{self.subscriptions}{name}".encode()

    def assignment(self, name: str) -> bytes:
        """Return the key of a topic's assignment."""
        return f"{self.assignments}{name}".encode()

    def worker(self, worker_id: str) -> bytes:
        """Return the key of a worker's session."""
        return f"{self.workers}{worker_id}".encode()

    def job(self, job_id: str) -> bytes:
        """Return the key of a job's session."""
        return f"{self.jobs}{job_id}".encode()

    def owner(self, name: str, partition: int) -> bytes:
        """Return the key of a partition's owner."""
        return f"{self.all_owners}{name}/{partition}".encode()

    def owners(self, name: str) -> bytes:
        """Return the prefix of a topic's owners."""
        return f"{self.all_owners}{name}/".encode()

    def lease(self, name: str) -> bytes:
        """Return the key of a named lease."""
        return f"{self.leases}{name}".encode()

    def cursor(self, topic_name: str, subscription_name: str, partition: int) -> bytes:
        """Return the key of a cursor."""
        return f"{self.all_cursors}{topic_name}/{subscription_name}/{partition}".encode()

    def cursors(self, topic_name: str, subscription_name: str = "") -> bytes:
        """Return the prefix of a topic's cursors, or of a subscription's on it."""
        name = f"{topic_name}/{subscription_name}/" if subscription_name else f"{topic_name}/"
        return f"{self.all_cursors}{name}".encode()

    def subscription_of_cursor(self, key: bytes) -> str:
        """Return whose cursor a key is."""
        parts = key.decode().removeprefix(self.all_cursors).split("/")
        return "/".join(parts[2:4])
