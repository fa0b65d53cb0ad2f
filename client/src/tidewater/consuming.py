"""What a blocking consumer and one for asyncio have in common."""

from tidewater.origin import Origin
from tidewater.pulling import ConsumerOptions, Pulling
from tidewater.settling import Tally
from tidewater_core.clock import Clock, IdSource
from tidewater_core.errors import TidewaterError
from tidewater_core.names import TopicName


class ConsumerBase:
    """Which subscription it is, and how its engine fares."""

    def __init__(
        self,
        origin: Origin,
        topic: TopicName | str,
        subscription: str,
        options: ConsumerOptions | None = None,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Make a consumer; it speaks to the server when it is entered or first asked."""
        self._origin = origin
        self._topic = topic if isinstance(topic, TopicName) else TopicName.parse(topic)
        self._subscription = subscription
        self._options = options or ConsumerOptions()
        self._clock, self._ids = clock, ids
        self._engine: Pulling | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Tell whether it hands out nothing more."""
        return self._closed

    @property
    def tally(self) -> Tally:
        """What became of messages so far."""
        return self._engine.tally if self._engine is not None else Tally()

    @property
    def trouble(self) -> TidewaterError | None:
        """Why nothing comes at the moment; it goes on trying."""
        return self._engine.trouble if self._engine is not None else None
