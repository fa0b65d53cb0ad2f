"""Where everything stands in etcd. Pure.

    tidewater/meta/topics/<ns>/<name>               {"topic", "uuid", "spec"}
    tidewater/meta/subscriptions/<ns>/<name>        {"name", "uuid", "spec"}
    tidewater/meta/assignments/<ns>/<topic>         {"<partition>": "<worker>"}
    tidewater/meta/workers/<id>                     {"worker_id", "url", …}, on the session's lease
    tidewater/meta/owners/<ns>/<topic>/<partition>  {"worker_id", "epoch", "volume", "session", …}
    tidewater/leases/<name>                         the holder's id, on its session's lease
    tidewater/cursors/<ns>/<topic>/<ns>/<subscription>/<partition>

Everything below `meta` changes seldom and every worker follows it by one watch; cursors change
all the time and are read by the owner of their partition alone.
"""

from typing import Final

ROOT: Final = "tidewater/"
META: Final = ROOT + "meta/"
TOPICS: Final = META + "topics/"
SUBSCRIPTIONS: Final = META + "subscriptions/"
ASSIGNMENTS: Final = META + "assignments/"
WORKERS: Final = META + "workers/"
OWNERS: Final = META + "owners/"
LEASES: Final = ROOT + "leases/"
CURSORS: Final = ROOT + "cursors/"


def topic(name: str) -> bytes:
    """Return the key of a topic."""
    return f"{TOPICS}{name}".encode()


def subscription(name: str) -> bytes:
    """Return the key of a subscription."""
    return f"{SUBSCRIPTIONS}{name}".encode()


def assignment(name: str) -> bytes:
    """Return the key of a topic's assignment."""
    return f"{ASSIGNMENTS}{name}".encode()


def worker(worker_id: str) -> bytes:
    """Return the key of a worker's session."""
    return f"{WORKERS}{worker_id}".encode()


def owner(name: str, partition: int) -> bytes:
    """Return the key of a partition's owner."""
    return f"{OWNERS}{name}/{partition}".encode()


def owners(name: str) -> bytes:
    """Return the prefix of a topic's owners."""
    return f"{OWNERS}{name}/".encode()


def lease(name: str) -> bytes:
    """Return the key of a named lease."""
    return f"{LEASES}{name}".encode()


def cursor(topic_name: str, subscription_name: str, partition: int) -> bytes:
    """Return the key of a cursor."""
    return f"{CURSORS}{topic_name}/{subscription_name}/{partition}".encode()


def cursors(topic_name: str, subscription_name: str = "") -> bytes:
    """Return the prefix of a topic's cursors, or of a subscription's on it."""
    name = f"{topic_name}/{subscription_name}/" if subscription_name else f"{topic_name}/"
    return f"{CURSORS}{name}".encode()


def subscription_of_cursor(key: bytes) -> str:
    """Return whose cursor a key is."""
    parts = key.decode().removeprefix(CURSORS).split("/")
    return "/".join(parts[2:4])


def split_owner(key: str) -> tuple[str, int]:
    """Return topic and partition of an owner's key."""
    name, _, partition = key.removeprefix(OWNERS).rpartition("/")
    return name, int(partition)
