"""What all kinds share: model settings, metadata, conditions, bounded amounts, CEL rules."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from tidewater_core.names import DNS_LABEL_PATTERN, dns_label_problem, is_dns_label
from tidewater_core.units import ByteSize, Duration

Count = Annotated[int, Strict()]
"""A whole number; text such as "3" is refused, as the Kubernetes API refuses it."""
Flag = Annotated[bool, Strict()]
"""True or false; "yes" and 1 are refused, as the Kubernetes API refuses them."""

AmountT = TypeVar("AmountT", Duration, ByteSize)


class Model(BaseModel):
    """A part of a spec: frozen, camelCase outside, no unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    def to_json(self) -> str:
        """Write as JSON with the names that manifests use."""
        return self.model_dump_json(by_alias=True, exclude_none=True)


class StatusModel(BaseModel):
    """A part of a status: written by us alone, so a newer version's fields are no error."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class ObjectMeta(StatusModel):
    """The part of Kubernetes' object metadata that we read."""

    name: str
    """Name of the object."""
    namespace: str = "default"
    """Namespace of the object."""
    uid: str | None = None
    """Identity that the API server gave; a deleted and re-made object has another."""
    generation: Count | None = None
    """Counts changes of the spec."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations."""


class Condition(StatusModel):
    """One aspect of the object's state, as Kubernetes' own kinds report it."""

    type: Annotated[str, Field(max_length=316)]
    """The aspect, such as Ready or FreshnessMet."""
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """True, False or Unknown."""
    reason: Annotated[str, Field(max_length=1024)]
    """One CamelCase word for machines."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """A sentence for people."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: Count | None = None
    """The generation of the spec that this was observed for."""


def cel(rule: str, message: str, **more: object) -> dict[str, object]:
    """Return one CEL validation rule of a CRD."""
    return {"rule": rule, "message": message, **more}


def rules(*items: dict[str, object]) -> dict[str, Any]:
    """Return the schema extra that carries CEL rules."""
    return {"x-kubernetes-validations": list(items)}


@dataclass(frozen=True)
class _Between(Generic[AmountT]):
    """Bounds of an amount, for pydantic and as a rule for the API server."""

    low: AmountT
    high: AmountT
    rule: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        message = f"must be between {self.low} and {self.high}"
        return {**handler(schema), **rules(cel(self.rule, message))}

    def _check(self, value: AmountT) -> AmountT:
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is not between {self.low} and {self.high}")
        return value


def cel_duration(text: str) -> str:
    """Return CEL for the duration that a text stands for, days included.

    CEL's duration() knows no days. Read as hours and again as minutes, they make a difference of
    59 minutes each: that tells how many there are, and 86,340 s more make a day of each minute. A
    number becomes a duration by way of timestamps: texts of unknown length are too dear.
    """
    hours, minutes = (f"duration({text}.replace('d', '{unit}'))" for unit in "hm")
    days = f"({hours} - {minutes}).getMinutes() / 59"
    return f"({minutes} + (timestamp({days} * 86340) - timestamp(0)))"


def time_between(low: str, high: str) -> _Between[Duration]:
    """Bound a duration; the message names both ends."""
    floor, ceiling = (f"duration('{Duration(end).ms}ms')" for end in (low, high))
    rule = f"[{cel_duration('self')}].all(t, t >= {floor} && t <= {ceiling})"
    return _Between(Duration(low), Duration(high), rule)


def size_between(low: str, high: str) -> _Between[ByteSize]:
    """Bound a size; the message names both ends."""
    rule = (
        f"quantity(self).compareTo(quantity('{low}')) >= 0"
        f" && quantity(self).compareTo(quantity('{high}')) <= 0"
    )
    return _Between(ByteSize(low), ByteSize(high), rule)


def dns_label(what: str) -> Any:
    """Require a DNS label; `what` names it in the message."""

    def check(value: str) -> str:
        if not is_dns_label(value):
            raise ValueError(dns_label_problem(what, value))
        return value

    return AfterValidator(check)


DNS_LABEL_EXTRA: dict[str, Any] = {"pattern": DNS_LABEL_PATTERN, "maxLength": 63}
"""The same rule for the API server."""
