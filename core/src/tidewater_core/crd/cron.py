"""Check the five fields of a cron schedule, so that a typing error is found when it is applied."""

import re

_RANGES = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
_PART = re.compile(r"(\*|[0-9]{1,2}(?:-[0-9]{1,2})?)(?:/([0-9]{1,2}))?")


def check_schedule(text: str) -> str:
    """Return the schedule as it is; raise ValueError with a message for a person."""
    fields = text.split()
    if len(fields) != len(_RANGES):
        raise ValueError(
            f"{text!r} is not a schedule; write five fields: minute hour day-of-month month "
            'day-of-week, such as "*/30 * * * *"'
        )
    for field, (name, low, high) in zip(fields, _RANGES, strict=True):
        for part in field.split(","):
            if not _is_good(part, low, high):
                raise ValueError(
                    f"{text!r}: {part!r} is not a {name}; write *, a number from {low} to {high}, "
                    "a range such as 1-5, or a step such as */10"
                )
    return text


def _is_good(part: str, low: int, high: int) -> bool:
    match = _PART.fullmatch(part)
    if match is None:
        return False
    if match[2] is not None and int(match[2]) == 0:
        return False
    if match[1] == "*":
        return True
    numbers = [int(n) for n in match[1].split("-")]
    return numbers == sorted(numbers) and low <= numbers[0] and numbers[-1] <= high
