"""The soak as a picture: what must stay flat, minute by minute, with the kills marked."""

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

PANELS: Final = (
    ("data files in the table", ("files_peak", "files"), ("just before upkeep", "after upkeep")),
    ("snapshots", ("snapshots",), ("",)),
    ("current metadata file, KiB", ("metadata_kib",), ("",)),
    ("all files on disk", ("disk_data_files", "disk_metadata_files"), ("data", "metadata")),
    ("commit: flush of one message, ms", ("flush_ms",), ("median of 5",)),
    ("table process, CPU ms per commit", ("cpu_ms_per_commit",), ("",)),
)
COLOURS: Final = ("#0b5d7a", "#d9822b")
KILL_COLOURS: Final = {"driver": "#b03a2e", "jvm": "#b03a2e", "table": "#7d3c98", "edge": "#1e8449"}


def draw(raw: dict[str, Any], path: Path) -> None:
    """Draw the samples of a soak."""
    samples = raw["samples"]
    minutes = [each["minute"] for each in samples]
    figure, axes = plt.subplots(3, 2, figsize=(10, 8), sharex=True)
    for place, (title, names, labels) in zip(axes.flat, PANELS, strict=True):
        for name, label, colour in zip(names, labels, COLOURS, strict=False):
            values = [each.get(name) for each in samples]
            place.plot(minutes, values, color=colour, marker="o", markersize=3, label=label or None)
        for kill in raw["kills"]:
            colour = KILL_COLOURS[kill["what"]]
            place.axvline(kill["minute"], color=colour, linewidth=0.6, alpha=0.5)
        place.set_title(title, fontsize=10)
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        if any(labels):
            place.legend(fontsize=8)
    for place in axes[-1]:
        place.set_xlabel("minute")
    figure.suptitle(
        f"{raw['minutes']:.0f} minutes at 1 s commits, {raw['messages']:,} messages; lines are "
        "kills: red Spark, purple table process, green edge",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=80)
