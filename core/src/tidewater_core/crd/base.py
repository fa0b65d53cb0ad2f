"""What all kinds share: model settings, metadata, conditions, bounded amounts, CEL rules."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel

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


def time_between(low: str, high: str) -> Any:  # noqa: ANN401 - a pydantic annotation
    """Bound a duration; the message names both ends."""
    return AfterValidator(_within(Duration(low), Duration(high)))


def size_between(low: str, high: str) -> Any:  # noqa: ANN401 - a pydantic annotation
    """Bound a size; the message names both ends."""
    return AfterValidator(_within(ByteSize(low), ByteSize(high)))


def _within(low: AmountT, high: AmountT) -> Callable[[AmountT], AmountT]:
    def check(value: AmountT) -> AmountT:
        if not low <= value <= high:
            raise ValueError(f"{value} is not between {low} and {high}")
        return value

    return check


def dns_label(what: str) -> Any:  # noqa: ANN401 - a pydantic annotation
    """Require a DNS label; `what` names it in the message."""

    def check(value: str) -> str:
        if not is_dns_label(value):
            raise ValueError(dns_label_problem(what, value))
        return value

    return AfterValidator(check)


DNS_LABEL_EXTRA: dict[str, Any] = {"pattern": DNS_LABEL_PATTERN, "maxLength": 63}
"""The same rule for the API server."""
