"""Which worker should have which partition: pure, sticky and balanced.

A partition whose messages may lie on one volume alone (*held*) belongs to that volume: it is only
ever told to move while its worker is there to drain it. Everything else is a question of balance,
and balance moves as little as it can.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]
"""A partition: topic and number."""


@dataclass(frozen=True)
class Holder:
    """The worker on whose volume a partition's messages may be, and nowhere else."""

    worker: str
    is_live: bool


@dataclass(frozen=True)
class Crew:
    """The workers of a pool."""

    members: Sequence[str]
    """Those that should be there, in order; one that is to go is not among them."""
    live: Collection[str] = ()
    """Those with a session."""
    starting: Collection[str] = ()
    """Those that will have one in a moment: worth giving work to."""


@dataclass
class _Board:
    """Who has how much, while it is decided."""

    wanted: dict[Place, str] = field(default_factory=dict)
    by_worker: dict[str, int] = field(default_factory=dict)
    by_topic: dict[tuple[str, str], int] = field(default_factory=dict)

    def put(self, place: Place, worker: str) -> None:
        before = self.wanted.get(place)
        if before is not None:
            self.by_worker[before] -= 1
            self.by_topic[place[0], before] -= 1
        self.wanted[place] = worker
        self.by_worker[worker] = self.by_worker.get(worker, 0) + 1
        key = (place[0], worker)
        self.by_topic[key] = self.by_topic.get(key, 0) + 1

    def load(self, worker: str, topic: str) -> tuple[int, int]:
        """Order workers for one more partition: all partitions first, then this topic's."""
        return self.by_worker.get(worker, 0), self.by_topic.get((topic, worker), 0)


def assign(
    partitions: Mapping[str, int],
    crew: Crew,
    current: Mapping[str, Mapping[int, str]],
    holders: Mapping[Place, Holder],
    moves_max: int = 16,
) -> dict[str, dict[int, str]]:
    """Return topic → partition → worker for all topics of one pool.

    `partitions` has their number by topic, `current` what was decided before. At most `moves_max`
    partitions drain at a time.
    """
    members = tuple(crew.members)
    assert members, "a pool has at least one worker"
    takers = [w for w in members if w in crew.live or w in crew.starting] or list(members)
    places = [(topic, p) for topic in sorted(partitions) for p in range(partitions[topic])]
    board = _Board()
    open_places = []
    for place in places:
        kept = _kept(place, crew, members, takers, current, holders)
        if kept is None:
            open_places.append(place)
        else:
            board.put(place, kept)
    moving = sum(1 for place, worker in board.wanted.items() if _drains(place, worker, holders))
    for place in open_places:
        topic = place[0]
        target = min(takers, key=lambda w, t=topic: (board.load(w, t), members.index(w)))  # type: ignore[misc]
        holder = holders.get(place)
        if holder is not None and holder.is_live and moving >= moves_max:
            board.put(place, holder.worker)  # its turn comes when others have arrived
            continue
        moving += 1 if holder is not None and holder.is_live else 0
        board.put(place, target)
    _balance(board, takers, members, holders, moves_max - moving)
    return _by_topic(board.wanted)


def _kept(
    place: Place,
    crew: Crew,
    members: Sequence[str],
    takers: Collection[str],
    current: Mapping[str, Mapping[int, str]],
    holders: Mapping[Place, Holder],
) -> str | None:
    """Return the worker that a partition stays with or is on its way to; None: find one."""
    before = current.get(place[0], {}).get(place[1])
    holder = holders.get(place)
    if holder is None:  # on no volume: whoever is there may have it
        return before if before in takers else None
    if holder.worker not in members:  # it leaves, or serves another pool
        return before if before in takers else None
    if not holder.is_live:  # it comes back where its volume is
        return holder.worker
    if before in crew.live and before in members:
        return before
    return holder.worker


def _drains(place: Place, worker: str, holders: Mapping[Place, Holder]) -> bool:
    holder = holders.get(place)
    return holder is not None and holder.is_live and holder.worker != worker


def _balance(
    board: _Board,
    takers: Sequence[str],
    members: Sequence[str],
    holders: Mapping[Place, Holder],
    moves_left: int,
) -> None:
    """Even out the numbers, one partition at a time, from the fullest to the emptiest."""
    rank = {worker: number for number, worker in enumerate(members)}
    movable: dict[str, list[Place]] = {worker: [] for worker in takers}
    for place, worker in board.wanted.items():
        holder = holders.get(place)
        settled = holder is None or (holder.is_live and holder.worker == worker)
        if worker in movable and settled:
            movable[worker].append(place)
    while True:
        counts = board.by_worker
        emptiest = min(takers, key=lambda w: (counts.get(w, 0), rank[w]))
        donors = [w for w in takers if movable[w] and counts[w] > counts.get(emptiest, 0) + 1]
        if not donors:
            return
        donor = max(donors, key=lambda w: (counts[w], -rank[w]))
        place = max(
            movable[donor],
            key=lambda p: (  # of the topic that it has most of, more than the other has
                board.by_topic.get((p[0], donor), 0) - board.by_topic.get((p[0], emptiest), 0),
                p,
            ),
        )
        movable[donor].remove(place)
        if holders.get(place) is not None:
            if moves_left <= 0:
                continue  # what is on no volume can still go
            moves_left -= 1
        board.put(place, emptiest)


def _by_topic(wanted: Mapping[Place, str]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for (topic, partition), worker in sorted(wanted.items()):
        found.setdefault(topic, {})[partition] = worker
    return found
