"""What a soak must show besides G1 to G3: that all of it happened, and that nothing grew. Pure."""

import statistics
from typing import Any, Final

FLAT: Final = {"files": 150, "snapshots": 400, "metadata_kib": 400.0}
"""What a sample, taken after a round of upkeep, may be once the first minutes are over: files are
those of some minutes; snapshots of a round whose job was killed are held until the next one."""
RISE_MAX: Final = 1.5
RISE: Final = {
    "files": 10.0,
    "snapshots": 40.0,
    "metadata_kib": 40.0,
    "disk_data_files": 60.0,
    "disk_metadata_files": 150.0,
    "cpu_ms_per_commit": 5.0,
    "flush_ms": 10.0,
}
"""What must not creep up below these bounds, either: the median of the last third of the samples is
at most `RISE_MAX` times that of the first, and this much, which is noise: a machine's, and of
orphans, which go every third round."""
RISE_SAMPLES_MIN: Final = 6
"""A median of fewer than two says nothing."""
WARM_MIN: Final = 3.0
EXPIRY_MIN: Final = 2.0
"""From then on each round finds snapshots that are old enough to go."""


def failures(answer: dict[str, Any] | None) -> list[str]:
    """Name what has failed in a round of upkeep. Pure."""
    if answer is None:
        return ["the driver ended, or gave no answer in time"]
    if "error" in answer:
        return [str(answer["error"])]
    return [
        f"{report['job']}: {report['message']}"
        for report in answer.get("reports", [])
        if report["outcome"] == "failed"
    ]


def judge_work(seen: dict[str, Any], alive: int = 0) -> list[str]:
    """Say what did not happen, and what grew: a promise that nobody tried is not held. Pure."""
    readers, samples = seen["readers"], seen["samples"]
    wrong = [f"soak: {alive} readers did not end"] if alive else []
    if not seen["messages"]:
        wrong.append("soak: no message was acknowledged")
    wrong += [f"soak: nothing was read: {who}" for who in readers["silent"]]
    done = seen["upkeep"]["outcomes"].get("compact done", 0)
    if done < len(samples) / 2:
        wrong.append(f"soak: {done} of {len(samples)} compactions were done")
    old = sum(sample["minute"] > EXPIRY_MIN for sample in samples)
    expired = seen["upkeep"]["outcomes"].get("expire done", 0)
    if expired < old / 2:
        wrong.append(f"soak: {expired} of {old} rounds expired snapshots")
    wrong += [f"soak: upkeep failed: {text}"[:500] for text in seen["upkeep"]["failed"]]
    return wrong + grown(samples)


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """Say what rose past a bound, and what crept up below it. Pure."""
    warm = [sample for sample in samples if sample["minute"] > WARM_MIN]
    wrong = [
        f"soak: {name} was {sample[name]} in minute {sample['minute']}, at most {bound} are flat"
        for name, bound in FLAT.items()
        for sample in warm
        if sample[name] > bound
    ]
    for name, slack in RISE.items():
        values = [sample[name] for sample in warm if sample.get(name) is not None]
        if len(values) < RISE_SAMPLES_MIN:
            continue
        third = len(values) // 3
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        if last > RISE_MAX * first + slack:
            wrong.append(f"soak: {name} rose from {first:g} to {last:g} (medians of a third each)")
    return wrong
