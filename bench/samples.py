"""Numbers from many samples. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest sample that `share` of all samples do not exceed."""
    if not ordered:
        raise ValueError("no samples")
    rank = max(1, -(-len(ordered) * share // 1))
    return ordered[min(int(rank), len(ordered)) - 1]


@dataclass(frozen=True, slots=True)
class Summary:
    """The distribution of some latencies."""

    count: int
    p50: float
    p99: float
    p999: float
    mean: float

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return asdict(self)


def summarise(samples: Iterable[float]) -> Summary:
    """Return the distribution of the samples."""
    ordered = sorted(samples)
    return Summary(
        count=len(ordered),
        p50=percentile(ordered, 0.5),
        p99=percentile(ordered, 0.99),
        p999=percentile(ordered, 0.999),
        mean=sum(ordered) / len(ordered),
    )


def middle(values: Iterable[float]) -> float:
    """Return the median of a few rounds."""
    return float(median(values))
