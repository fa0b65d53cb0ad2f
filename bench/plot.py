"""The result as a picture."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.samples import middle

COLOURS = {
    "floor": "#888888",
    "floor, space reserved": "#bbbbbb",
    "nats": "#27aae1",
    "nats, bare socket": "#8fd3ef",
    "tidewater": "#0b5d7a",
    "tidewater, asyncio client": "#3f8ba6",
}


def draw(raw: dict[str, Any], path: Path) -> None:
    """Draw whatever was measured."""
    panels = [
        (panel, raw[name])
        for name, panel in (
            ("ack", _ack),
            ("flight", _flight),
            ("bulk", _bulk),
            ("table", _table),
            ("commits", _commits),
            ("memory", _memory),
        )
        if name in raw
    ]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6.2 * columns, 4.2 * rows), squeeze=False)
    axes = list(grid.flat)
    for (panel, data), axis in zip(panels, axes, strict=False):
        panel(axis, data)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ack(axis: Axes, data: dict[str, Any]) -> None:
    for name, found in data["100 B"].items():
        samples = sorted(found["samples"])
        shares = [(i + 1) / len(samples) for i in range(len(samples))]
        axis.plot(samples, shares, label=name, color=COLOURS.get(name))
    axis.set_xscale("log")
    axis.set_xlabel("µs")
    axis.set_ylabel("share of acks")
    axis.set_title("Ack latency, 100 B, one in flight, fsync before ack")
    axis.legend(fontsize=8)


def _flight(axis: Axes, data: dict[str, Any]) -> None:
    for number, (name, rates) in enumerate(data["rates"].items()):
        axis.bar(number, middle(rates), color=COLOURS[name], label=name)
        axis.scatter([number] * len(rates), rates, color="black", s=8, zorder=3)
    axis.set_xticks(range(len(data["rates"])), list(data["rates"]))
    axis.set_ylabel("msg/s")
    axis.set_title("64 single messages in flight on 8 connections")


def _bulk(axis: Axes, data: dict[str, Any]) -> None:
    for number, (name, rates) in enumerate(data["rates"].items()):
        colour = COLOURS["nats" if name.startswith("NATS") else "tidewater"]
        axis.bar(number, middle(rates), color=colour)
        axis.scatter([number] * len(rates), rates, color="black", s=8, zorder=3)
    axis.set_xticks(range(len(data["rates"])), list(data["rates"]))
    axis.set_yscale("log")
    axis.set_ylabel("msg/s")
    axis.set_title("Bulk: batches of 1,000 × 100 B")


def _table(axis: Axes, data: dict[str, Any]) -> None:
    flood = data["flood"]
    began = flood["began_at"]
    seen = [(at - began, upto / 1e6) for at, upto in flood["seen"] if at >= began]
    axis.step(
        [0, *(at for at, _ in seen)], [0, *(n for _, n in seen)], where="post", label="visible"
    )
    axis.plot([0, flood["ended_at"] - began], [0, flood["rows"] / 1e6], "--", label="acknowledged")
    axis.set_xlabel("seconds")
    axis.set_ylabel("million rows")
    axis.set_title("Rows acknowledged and visible in the table")
    axis.legend(fontsize=8)


def _commits(axis: Axes, data: dict[str, Any]) -> None:
    window = data["window"]
    at = [window * (i + 0.5) for i in range(len(data["cpu_ms"]))]
    axis.plot(range(len(data["flush_ms"])), data["flush_ms"], ".", ms=2, label="flush, ms")
    axis.plot(at, data["cpu_ms"], label="CPU of the table process, ms")
    axis.set_xlabel("commit")
    axis.set_ylim(bottom=0)
    axis.set_title("Cost of a commit as their number grows")
    axis.legend(fontsize=8)


def _memory(axis: Axes, data: dict[str, Any]) -> None:
    axis.plot([at for at, _ in data["series"]], [size / 1e6 for _, size in data["series"]])
    axis.set_xlabel("seconds")
    axis.set_ylabel("MB, all processes")
    axis.set_ylim(bottom=0)
    axis.set_title("Memory while producing")
