"""Subscription: a named position in a topic that its consumers share and move by acknowledging."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from tidewater_core.crd.base import (
    DNS_LABEL_EXTRA,
    Count,
    Model,
    ObjectMeta,
    cel,
    dns_label,
    rules,
    time_between,
)
from tidewater_core.crd.status import SubscriptionStatus
from tidewater_core.names import TopicName
from tidewater_core.units import Duration

INT64_MAX = (1 << 63) - 1
_TIMESTAMP = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(\.\d{1,6})?([Zz]|[+-]\d{2}:\d{2})")


class SubscriptionType(StrEnum):
    """How consumers share the messages."""

    EXCLUSIVE = "Exclusive"
    """One consumer; a second is refused."""
    FAILOVER = "Failover"
    """One consumer per partition; another takes over when it goes."""
    SHARED = "Shared"
    """Each message goes to any one consumer; order is not kept between them."""
    KEY_SHARED = "KeyShared"
    """As Shared, but one key's messages go to one consumer, in order."""


class Isolation(StrEnum):
    """How far a reader may read."""

    ACKNOWLEDGED = "acknowledged"
    """To the end of the log: every acknowledged message, within milliseconds."""
    COMMITTED = "committed"
    """Only what is in the table: what SQL sees."""


def _fits_int64(value: int) -> int:
    # Not `le=`: the API server holds a schema's maximum in a float, where this one overflows.
    if value > INT64_MAX:
        raise ValueError(f"must be less than or equal to {INT64_MAX}")
    return value


class StartFrom(Model):
    """Where to begin: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "[has(self.position), has(self.offset), has(self.timestamp),"
                " has(self.snapshotId), has(self.tag)].filter(x, x).size() == 1",
                "startFrom takes exactly one of position, offset, timestamp, snapshotId, tag",
            )
        )
    )

    position: Literal["earliest", "latest"] | None = None
    """earliest: the first message still kept. latest: the next one to arrive."""
    offset: Annotated[Count, Field(ge=0), AfterValidator(_fits_int64)] | None = None
    """This offset, in every partition."""
    timestamp: Annotated[
        str | None, Field(max_length=40, json_schema_extra={"format": "date-time"})
    ] = None
    """The first message published at or after this time (RFC 3339, such as
    2026-01-31T12:00:00Z)."""
    snapshot_id: Annotated[Count, Field(ge=1), AfterValidator(_fits_int64)] | None = None
    """Just after the messages of this snapshot of the table."""
    tag: Annotated[str | None, Field(min_length=1, max_length=255)] = None
    """Just after the messages of the snapshot with this tag."""

    @field_validator("timestamp")
    @classmethod
    def _timestamp_is_rfc3339(cls, text: str | None) -> str | None:
        problem = f"{text!r} is not a time; write it as 2026-01-31T12:00:00Z, zone included"
        if text is not None:
            if _TIMESTAMP.fullmatch(text) is None:
                raise ValueError(problem)
            try:
                datetime.fromisoformat(text.upper())
            except ValueError as error:
                raise ValueError(problem) from error
        return text

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "takes exactly one of position, offset, timestamp, snapshotId, tag, "
                f"not {len(given)}"
            )
        return self

    @property
    def timestamp_us(self) -> int | None:
        """The time in microseconds since 1970-01-01 UTC."""
        if self.timestamp is None:
            return None
        delta = datetime.fromisoformat(self.timestamp.upper()) - datetime.fromisoformat(
            "1970-01-01T00:00:00+00:00"
        )
        return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


class BackoffSpec(Model):
    """How long a message that was not acknowledged waits before it is delivered again."""

    initial: Annotated[Duration, time_between("0s", "1d")] = Duration("1s")
    """Wait before the second delivery."""
    multiplier: Annotated[Count, Field(ge=1, le=10)] = 2
    """Each further wait is this many times the one before."""
    max: Annotated[Duration, time_between("0s", "7d")] = Duration("5m")
    """Longest wait."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.initial > self.max:
            raise ValueError(f"initial ({self.initial}) must not be longer than max ({self.max})")
        return self


class DeadLetterSpec(Model):
    """Where messages go that were delivered too often."""

    topic: Annotated[str, dns_label("topic"), Field(json_schema_extra=DNS_LABEL_EXTRA)]
    """A topic of the same namespace. Headers tell origin, reason and attempts."""


class FilterSpec(Model):
    """Which messages are delivered; others count as acknowledged. All given parts must hold."""

    key: Annotated[str, Field(max_length=1024)] | None = None
    """The key is exactly this."""
    key_prefix: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The key begins with this."""
    headers: Annotated[dict[str, str], Field(max_length=32)] = Field(default={})
    """Each of these headers has exactly this value."""
    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A condition on the columns of a typed topic, such as "amount > 100 AND region = 'eu'". On
    history it also skips files by their statistics."""


class SubscriptionSpec(Model):
    """What a subscription should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.startFrom == oldSelf.startFrom || (has(self.resetToken)"
                " && (!has(oldSelf.resetToken) || self.resetToken != oldSelf.resetToken))",
                "startFrom only applies again with a new resetToken: change both",
            ),
            cel(
                "!has(self.deadLetter) || self.deadLetter.topic != self.topic",
                "deadLetter.topic must be another topic than the one subscribed to",
            ),
        )
    )

    topic: Annotated[
        str,
        dns_label("topic"),
        Field(
            json_schema_extra={
                **DNS_LABEL_EXTRA,
                **rules(cel("self == oldSelf", "a subscription stays with its topic")),
            }
        ),
    ]
    """The topic, in the same namespace."""
    type: SubscriptionType = SubscriptionType.SHARED
    """How consumers share the messages: Exclusive, Failover, Shared or KeyShared."""
    start_from: StartFrom = StartFrom(position="earliest")
    """Where to begin; later only with a new resetToken."""
    reset_token: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Any text; changing it moves the subscription to startFrom again, once."""
    isolation: Isolation = Isolation.ACKNOWLEDGED
    """acknowledged: to the end of the log. committed: only what is in the table."""
    ack_deadline: Annotated[Duration, time_between("100ms", "1d")] = Duration("30s")
    """A message not acknowledged within this time is delivered again."""
    max_unacked: Annotated[Count, Field(ge=1, le=1_000_000)] = 1_000
    """Most messages delivered and not yet acknowledged, per consumer."""
    max_deliveries: Annotated[Count, Field(ge=1, le=1_000)] = 5
    """After this many deliveries a message goes to deadLetter. Without deadLetter it is delivered
    again for ever: nothing is silently skipped."""
    backoff: BackoffSpec = BackoffSpec()
    """Waits between deliveries of the same message."""
    dead_letter: DeadLetterSpec | None = None
    """Where messages go that were delivered too often."""
    filter: FilterSpec | None = None
    """Which messages are delivered. Left out: all."""

    @model_validator(mode="after")
    def _dead_letter_elsewhere(self) -> Self:
        if self.dead_letter is not None and self.dead_letter.topic == self.topic:
            raise ValueError("deadLetter.topic must be another topic than the one subscribed to")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, by any version; raises pydantic's ValidationError.

        A newer version's fields are passed over: it is people whose unknown fields are errors.
        """
        return cls.model_validate_json(text, extra="ignore")


class Subscription(Model):
    """A named position in a topic that consumers share and move by acknowledging."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')"
                " && self.metadata.name.size() <= 63",
                "a subscription's name must be at most 63 characters of a-z, 0-9 and '-'",
            )
        )
    )

    api_version: Literal["tidewater.dev/v1alpha1"] = "tidewater.dev/v1alpha1"
    """Always tidewater.dev/v1alpha1."""
    kind: Literal["Subscription"] = "Subscription"
    """Always Subscription."""
    metadata: ObjectMeta
    """Name, namespace, labels."""
    spec: SubscriptionSpec
    """What the subscription should be."""
    status: SubscriptionStatus | None = None
    """How far it is, written by the operator."""

    @property
    def topic(self) -> TopicName:
        """The full name of its topic."""
        return TopicName(self.metadata.namespace, self.spec.topic)
