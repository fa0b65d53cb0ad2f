"""The judges: each function checks one promise and quotes it when it is broken.

All are pure: they get what was seen and return one line for each violation. `docs/guarantees.md`
has the promises in full.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from e2e.history import History, Message, Snapshot
from tidewater_testing import checker
from tidewater_testing.web import Answer

G3 = "G3 One stream"
G4 = "G4 At least once to a subscription"
G5 = "G5 One owner"
G6 = "G6 Bounded"
G7 = "G7 Nothing is silently skipped"
G9 = "G9 Nobody gets in"
SHOWN_MAX = 40


def hold(history: History) -> None:
    """Raise with every violation of the promises that a history can be judged by."""
    raise_all(violations(history))


def raise_all(found: Sequence[str]) -> None:
    """Raise `AssertionError` if there is any violation."""
    if found:
        more = [f"… and {len(found) - SHOWN_MAX} more"] if len(found) > SHOWN_MAX else []
        raise AssertionError("\n".join([*found[:SHOWN_MAX], *more]))


def violations(history: History) -> list[str]:
    """Judge a history: G1, G2 and G8 by the table, G3 by what was read, G5 by the epochs."""
    found = checker.violations(history.evidence, history.acked, flushed=True)
    for partition, messages in history.stream.items():
        found.extend(one_stream(partition, messages))
    found.extend(read_what_was_acked(history))
    found.extend(one_owner(history.snapshots))
    return found


def one_stream(partition: int, messages: Sequence[Message], start: int = 0) -> Iterator[str]:
    """G3: a reader sees each message once, in the order of offsets, from `start` on."""
    expected = start
    for message in messages:
        where = f"{G3}: partition {partition} offset {message.offset}"
        if message.partition != partition:
            yield f"{where} was delivered as partition {message.partition}"
        if message.offset < expected:
            yield f"{where} twice, or out of order (expected {expected})"
        elif message.offset > expected:
            yield f"{G3}: partition {partition} offsets {expected} to {message.offset - 1} not seen"
        expected = max(expected, message.offset + 1)


def read_what_was_acked(history: History) -> Iterator[str]:
    """G1 and G3: what is read at an acknowledged offset is what was acknowledged."""
    read = {
        (message.partition, message.offset): message.value
        for messages in history.stream.values()
        for message in messages
    }
    for batch in history.acked:
        places = [
            (place.partition, offset)
            for place in batch.ranges
            for offset in range(place.offset, place.offset + place.count)
        ]
        missing = [place for place in places if place not in read]
        for partition, offset in missing:
            yield f"{G3}: partition {partition} offset {offset} was acknowledged and is not read"
        if not missing and {read[place] for place in places} != set(batch.payloads):
            yield (
                f"{G3}: what is read from partition {places[0][0]} offset {places[0][1]} on is "
                "not what was acknowledged"
            )


def one_owner(snapshots: Sequence[Snapshot]) -> Iterator[str]:
    """G5: the epoch of a partition never goes back from one snapshot to the next."""
    highest: dict[int, int] = {}
    for snapshot in snapshots:
        for partition, epoch in snapshot.epochs.items():
            if epoch < highest.get(partition, epoch):
                yield (
                    f"{G5}: partition {partition} has epoch {epoch} in snapshot "
                    f"{snapshot.snapshot_id}, after epoch {highest[partition]}"
                )
            highest[partition] = max(epoch, highest.get(partition, epoch))


def delivered_until_acked(
    sent: Iterable[Message],
    deliveries: Sequence[tuple[Message, bool]],
) -> Iterator[str]:
    """G4: every message is delivered, and none again after its ack was answered.

    `deliveries` in the order they happened; the flag says whether that delivery was acknowledged.
    """
    acked: set[tuple[int, int]] = set()
    seen: set[tuple[int, int]] = set()
    for message, was_acked in deliveries:
        place = (message.partition, message.offset)
        if place in acked:
            yield f"{G4}: partition {place[0]} offset {place[1]} was delivered after its ack"
        seen.add(place)
        if was_acked:
            acked.add(place)
    for message in sent:
        if (message.partition, message.offset) not in seen:
            yield f"{G4}: partition {message.partition} offset {message.offset} never delivered"


def pushed_back(refused: Answer) -> Iterator[str]:
    """G6: past a limit the caller gets a status of its kind, a reason, and when to come back."""
    if refused.status not in {413, 429, 503}:
        yield f"{G6}: the answer past a limit is {refused.status}, not 413, 429 or 503"
    if not refused.reason:
        yield f"{G6}: the answer {refused.status} past a limit gives no reason"
    if refused.status in {429, 503} and refused.retry_after_s is None:
        yield f"{G6}: the answer {refused.status} does not say when to try again"


def stopped_with_reason(states: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """G7: a partition that does not run says why."""
    for partition, state in states.items():
        if state.get("state") != "running" and not state.get("reason"):
            yield f"{G7}: partition {partition} is {state.get('state')} without a reason"


def refused_stranger(answer: Answer) -> Iterator[str]:
    """G9: without a token 401, without the right 403 or 404, and never any data."""
    if answer.status not in {401, 403, 404}:
        yield f"{G9}: a caller without the right got {answer.status}"
