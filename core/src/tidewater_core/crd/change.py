"""Which changes of a spec are allowed: the CRDs' CEL rules, where no API server checks them."""

from tidewater_core.crd.subscription import SubscriptionSpec
from tidewater_core.crd.topic import FieldSpec, SchemaSpec, TopicSpec

_WIDENS = {("int", "long"), ("float", "double")}


def topic_change_problems(old: TopicSpec, new: TopicSpec) -> list[str]:
    """Say what is wrong with changing a topic's spec so; empty when it is allowed."""
    found = []
    if new.partitions < old.partitions:
        found.append(
            f"partitions: may grow, never shrink ({old.partitions} to {new.partitions}): "
            "offsets would be lost"
        )
    if new.table.name != old.table.name:
        found.append("table.name: cannot change: its rows are this topic's only history")
    if new.table.partition_by != old.table.partition_by:
        found.append("table.partitionBy: is fixed when the table is made; evolve it with SQL")
    if (new.schema_ is None) != (old.schema_ is None):
        found.append("schema: a topic stays raw or typed: make a new topic instead")
    if old.schema_ is not None and new.schema_ is not None:
        found.extend(_schema_problems(old.schema_, new.schema_))
    return found


def _schema_problems(old: SchemaSpec, new: SchemaSpec) -> list[str]:
    before = {field.name: field for field in old.fields}
    after = {field.name: field for field in new.fields}
    found = [
        f"schema: column {name!r} cannot be removed: readers of older rows need it"
        for name in before
        if name not in after
    ]
    for name, field in after.items():
        found.extend(_field_problems(before.get(name), field))
    return found


def _field_problems(old: FieldSpec | None, new: FieldSpec) -> list[str]:
    if old is None:
        if new.required:
            return [f"schema: new column {new.name!r} cannot be required: older rows lack it"]
        return []
    found = []
    if new.type != old.type and (old.type, new.type) not in _WIDENS:
        found.append(
            f"schema: column {new.name!r} cannot change from {old.type} to {new.type}; "
            "a type may only be widened: int to long, float to double"
        )
    if new.required and not old.required:
        found.append(
            f"schema: optional column {new.name!r} cannot become required: older rows may lack it"
        )
    return found


def subscription_change_problems(old: SubscriptionSpec, new: SubscriptionSpec) -> list[str]:
    """Say what is wrong with changing a subscription's spec so; empty when it is allowed."""
    found = []
    if new.topic != old.topic:
        found.append("topic: a subscription stays with its topic")
    if new.start_from != old.start_from and new.reset_token in (None, old.reset_token):
        found.append("startFrom: only applies again with a new resetToken: change both")
    return found
