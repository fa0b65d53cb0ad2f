"""A message between fetched and acknowledged, and those that it keeps its order with. Pure."""


class Open:
    """A message that was fetched and is not acknowledged."""

    __slots__ = ("dead", "deliveries", "due", "group", "holder", "lease", "offset")

    def __init__(self, offset: int, group: "Group | None") -> None:
        self.offset = offset
        self.group = group
        self.deliveries = 0
        self.lease = 0
        """Of its last delivery; 0 before the first."""
        self.holder: str | None = None
        """The consumer it is out with."""
        self.due = 0.0
        """While out: the deadline. While delayed: the end of the delay. Else 0."""
        self.dead: str | None = None
        """Why it is dead."""

    @property
    def can_go(self) -> bool:
        """Tell whether it may be delivered now."""
        return self.holder is None and self.due == 0.0 and self.dead is None


class Group:
    """Messages that keep their order."""

    __slots__ = ("key", "out", "queued", "waiting")

    def __init__(self, key: int) -> None:
        self.key = key
        self.waiting: list[int] = []
        """Heap of offsets; ones that went meanwhile are dropped when they come up."""
        self.out: dict[int, Open] = {}
        self.queued: tuple[str, int] | None = None
        """The consumer and first offset under which it stands in a queue."""

    @property
    def holder(self) -> str | None:
        """The consumer that holds some of it."""
        for message in self.out.values():
            return message.holder
        return None
