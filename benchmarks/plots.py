# SPDX-License-Identifier: Apache-2.0
"""Draws the results: one figure a file.

    python benchmarks/plots.py [benchmarks/results]

Each figure is drawn from its benchmark's JSON file, if that exists; `compression` from formulas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

Report = dict[str, Any]
MB = 1 << 20

# One colour for each library, in all figures; a palette that colour-blind readers can tell apart.
COLOURS = {
    "torch_ring": "#0072b2",
    "torch_ring, shared": "#56b4e9",
    "gloo": "#d55e00",
    "ddp": "#d55e00",
    "mpi": "#009e73",
    "copy": "#999999",
    "touch": "#cc79a7",
    "torch": "#999999",
}
COLOURS |= {"sharded": "#0072b2", "unsharded": "#56b4e9", "zero": "#e69f00"}
SHARDING = {
    "sharded": "shard_state=True",
    "unsharded": "shard_state=False",
    "ddp": "DDP, gloo",
    "zero": "DDP, ZeroRedundancyOptimizer",
}
RANKS = range(2, 17)  # of compression()
BIN_S, CALM_S = 0.25, 2.0  # of the steps of recovery.py
# Two pixels for each of a page's 72 an inch, and letters that a phone shows legibly.
DPI = 160
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
NAMES = {"mpi": "Open MPI", "touch": "read and write once", "ddp": "DDP, gloo"}


def load(folder: Path) -> dict[str, Report]:
    """Return the reports in the folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def rows_of(reports: dict[str, Report], name: str) -> list[Report]:
    return reports[name]["rows"] if name in reports else []


def of_kind(rows: Iterable[Report], dtype: str, memory: str) -> list[Report]:
    return [row for row in rows if (row["type"], row["memory"]) == (dtype, memory)]


def allreduce(reports: dict[str, Report], axes: Axes) -> None:
    """Bandwidth by size, of all libraries."""
    rows = rows_of(reports, "allreduce")
    private, shared = (of_kind(rows, "float32", memory) for memory in ("private", "shared"))
    lines = {library: (private, library) for library in private[0]["results"]}
    if shared:
        lines["torch_ring, shared"] = (shared, "torch_ring")
    for label, (of_rows, library) in lines.items():
        draw(axes, label, of_rows, lambda row, x=library: row["results"][x]["algbw"])
    label_bandwidth(reports, axes)


def overview(reports: dict[str, Report], sheet: Figure) -> None:
    """README.md's picture: allreduce of three libraries by size, and training steps beside DDP."""
    left, right = sheet.subplots(1, 2, width_ratios=(1, 1))
    rows = of_kind(rows_of(reports, "allreduce"), "float32", "private")
    for library in ("torch_ring", "mpi", "gloo"):
        if library in rows[0]["results"]:
            draw(left, library, rows, lambda row, x=library: row["results"][x]["algbw"])
    label_bandwidth(reports, left)
    steps: dict[str, dict[str, float]] = {}
    for row in rows_of(reports, "training_step"):
        steps.setdefault(row["model"], {})[row["variant"]] = row["step_ms"]
    for offset, variant in ((-0.2, "torch_ring"), (0.2, "ddp")):
        heights = [of_model[variant] / of_model["ddp"] for of_model in steps.values()]
        places = [place + offset for place in range(len(steps))]
        bars = right.bar(places, heights, 0.38, color=COLOURS[variant], label=name_of(variant))
        if variant != "ddp":
            right.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8)
    right.set_xticks(range(len(steps)), list(steps), fontsize=9)
    right.set(
        ylim=(0, 1.3),
        ylabel="time / DDP's",
        title=f"a training step, {machine(reports, 'training_step')}",
    )


def collectives(reports: dict[str, Report], axes: Axes) -> None:
    """Speed of the other collectives relative to gloo, by size."""
    rows = rows_of(reports, "collectives")
    for collective in dict.fromkeys(row["collective"] for row in rows):
        of_one = [row for row in rows if row["collective"] == collective]
        draw(axes, collective, of_one, lambda row: row["ratios"]["gloo"])
    axes.axhline(1, color=COLOURS["gloo"], linestyle=":")
    sizes(axes)
    axes.set(
        yscale="log",
        ylabel="gloo's time / torch_ring's",
        title=f"speed relative to gloo, float32, {machine(reports, 'collectives')}",
    )


def hosts(reports: dict[str, Report], axes: Axes, count: int) -> None:
    """Bandwidth among hosts, and that of bare TCP there."""
    name = f"hosts-{count}"
    rows = rows_of(reports, name)
    for library in rows[0]["results"]:
        draw(axes, library, rows, lambda row, x=library: row["results"][x]["busbw"])
    traffic = reports[name]["traffic"]
    without = (traffic["before_gb_per_s"] + traffic["after_gb_per_s"]) / 2
    axes.axhline(without, color=COLOURS["copy"], linestyle="--", label=traffic["tool"])
    sizes(axes)
    axes.set(
        yscale="log",
        ylabel="sent by each host (GB/s)",
        title=f"allreduce, {count} hosts (namespaces, veth), {machine(reports, name)}",
    )


def training_step(reports: dict[str, Report], axes: Axes) -> None:
    """Time of a step of each model, relative to that of torch without communication."""
    rows = rows_of(reports, "training_step")
    models = list(dict.fromkeys(row["model"] for row in rows))
    alone = {row["model"]: row["step_ms"] for row in rows if row["variant"] == "torch"}
    for offset, variant in ((-0.2, "torch_ring"), (0.2, "ddp")):
        steps = [row for row in rows if row["variant"] == variant]
        heights = [row["step_ms"] / alone[row["model"]] for row in steps]
        places = [place + offset for place in range(len(models))]
        bars = axes.bar(places, heights, 0.38, color=COLOURS[variant], label=name_of(variant))
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=9)
    axes.axhline(1, color="#000000", linestyle=":", label="no communication")
    axes.set_xticks(range(len(models)), models)
    axes.margins(y=0.25)  # for the numbers, and the legend
    axes.set(
        ylabel="time / that without communication",
        title=f"a training step, {machine(reports, 'training_step')}",
    )


def sharded_state(reports: dict[str, Report], axes: Axes) -> None:
    """Memory and time of sharded optimizer state, relative to one that is not sharded."""
    rows = {row["variant"]: row for row in rows_of(reports, "sharded_state")}
    values = {"pss_mib": "{:.0f} MiB", "step_ms": "{:.0f} ms", "whole_ms": "{:.0f} ms"}
    for position, (variant, name) in enumerate(SHARDING.items()):
        row, base = rows[variant], rows["unsharded"]
        places = [place + 0.2 * position - 0.3 for place in range(len(values))]
        heights = [row[value] / base[value] for value in values]
        bars = axes.bar(places, heights, 0.19, color=COLOURS[variant], label=name)
        labels = [text.format(row[value]) for value, text in values.items()]
        axes.bar_label(bars, labels, fontsize=8, rotation=90, padding=3)
    axes.set_xticks(range(len(values)), ["memory of all ranks", "step()", "a training step"])
    axes.margins(y=0.35)  # for the numbers
    axes.set(
        ylabel="relative to shard_state=False",
        title=f"Adam, {base['parameters'] / 1e6:.0f} M parameters, "
        f"{machine(reports, 'sharded_state')}",
    )


def slow_links(reports: dict[str, Report], axes: Axes) -> None:
    """Tokens per second over a slow network, and the bytes of a step."""
    rows = rows_of(reports, "slow_links")
    names = {"ddp": "DDP, gloo", "distributed": "DistributedOptimizer", "diloco": "DiLoCo"}
    colours = [COLOURS["ddp"], COLOURS["torch_ring"], COLOURS["torch_ring, shared"]]
    labels = [f"{names[row['variant']]}\n{row['sent_bytes'] / 1e6:.3g} MB a step" for row in rows]
    bars = axes.bar(labels, [row["tokens_per_s"] for row in rows], 0.6, color=colours)
    axes.bar_label(bars, [f"{row['tokens_per_s']:.0f}" for row in rows])
    axes.margins(y=0.15)  # for the numbers
    facts = reports["slow_links"]["machine"]
    axes.set(
        ylabel="tokens per second, all ranks",
        title=f"{facts['ranks']} ranks on {facts['hosts']} hosts, {facts['rate']} between them",
    )


def compression(_reports: dict[str, Report], axes: Axes) -> None:
    """Bytes that a rank receives for an element, by the formulas in docs/compression.md."""
    rows = columns = 1024
    ring = [2 * (ranks - 1) / ranks for ranks in RANKS]
    lines = {
        "none": [share * 4 for share in ring],
        "fp16, bf16": [share * 2 for share in ring],
        "int8": [(ranks - 1) * (1 + 4 / 256) for ranks in RANKS],
        "powersgd(rank=4)": [share * 4 * 4 * (rows + columns) / (rows * columns) for share in ring],
    }
    for (name, values), colour in zip(
        lines.items(), ("#999999", "#56b4e9", "#e69f00", "#0072b2"), strict=True
    ):
        axes.plot(RANKS, values, ".-", color=colour, label=name)
    axes.set_yscale("log")
    axes.set_yticks([0.03, 0.1, 0.3, 1, 3, 10], ["0.03", "0.1", "0.3", "1", "3", "10"])
    axes.set_xticks(RANKS[::2])
    axes.set(
        xlabel="ranks",
        ylabel="bytes received for an element",
        title=f"by the formulas, a matrix of {rows} x {columns}",
    )


def init_scale(reports: dict[str, Report], axes: Axes) -> None:
    """Time until a world can work, by ranks: on one host, and among namespaces."""
    rows = [row for row in rows_of(reports, "init_scale") if row["seconds"] is not None]
    for library in dict.fromkeys(row["library"] for row in rows):
        for many, style in ((False, ".-"), (True, "^--")):
            of_one = [r for r in rows if r["library"] == library and (r["hosts"] > 1) == many]
            if not of_one:
                continue
            points = [(row["ranks"], row["seconds"]) for row in of_one]
            where = f", {of_one[0]['ranks'] // of_one[0]['hosts']} ranks a host" if many else ""
            label, colour = f"{name_of(library)}{where}", COLOURS.get(library)
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    ticks = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(
        xlabel="ranks",
        yscale="log",
        ylabel="init() and an allreduce (s)",
        title=f"the start of a world on {reports['init_scale']['machine']['cores']} cores",
    )


def recovery(reports: dict[str, Report], axes: Axes) -> None:
    """Speed around the death of a rank, under each launcher, relative to that before it."""
    rows = [row for row in rows_of(reports, "recovery") if row["whole_s"] is not None]
    for row, colour in zip(rows, ("#0072b2", "#56b4e9", "#d55e00"), strict=False):
        starts = [BIN_S * index - CALM_S for index in range(len(row["steps_per_s"]))]
        calm = median(row["steps_per_s"][: round(CALM_S / BIN_S)])
        speeds = [100 * speed / calm for speed in row["steps_per_s"]]
        axes.step(starts, speeds, where="post", color=colour, label=row["what"])
    axes.axvline(0, color="#999999", linestyle=":", label="a rank is killed")
    cores = reports["recovery"]["machine"]["cores"]
    axes.set(
        xlabel="seconds after the kill",
        ylabel="steps/s, % of the median before",
        ylim=0,
        title=f"4 ranks on {cores} cores, one of them killed",
    )


def draw(axes: Axes, label: str, rows: Iterable[Report], value: Callable[[Report], float]) -> None:
    points = [(row["bytes"], value(row)) for row in rows]
    axes.plot(*zip(*points, strict=True), ".-", color=COLOURS.get(label), label=name_of(label))


def name_of(label: str) -> str:
    return NAMES.get(label, label)


def sizes(axes: Axes) -> None:
    """Label the axis of bytes."""
    axes.set_xscale("log", base=4)
    ticks = [1 << power for power in range(10, 27, 4)]
    labels = [f"{t // MB} MB" if t >= MB else f"{t // 1024} KB" for t in ticks]
    low, high = axes.get_xlim()
    axes.set_xticks(ticks, labels)
    axes.set_xlim(low, high)


def label_bandwidth(reports: dict[str, Report], axes: Axes) -> None:
    """Label a figure of an allreduce's bandwidth by size."""
    sizes(axes)
    axes.set(
        yscale="log",
        ylabel="bytes / time (GB/s)",
        title=f"allreduce, {machine(reports, 'allreduce')}",
    )


def machine(reports: dict[str, Report], name: str) -> str:
    facts = reports[name]["machine"]
    return f"{facts['ranks']} ranks on {facts['cores']} cores"


# By file: the report that it needs, if any, and the function that draws it.
FIGURES: dict[str, tuple[str | None, Callable[[dict[str, Report], Axes], None]]] = {
    "allreduce": ("allreduce", allreduce),
    "collectives": ("collectives", collectives),
    "hosts-2": ("hosts-2", lambda reports, axes: hosts(reports, axes, 2)),
    "hosts-3": ("hosts-3", lambda reports, axes: hosts(reports, axes, 3)),
    "training_step": ("training_step", training_step),
    "sharded_state": ("sharded_state", sharded_state),
    "slow_links": ("slow_links", slow_links),
    "compression": (None, compression),
    "init_scale": ("init_scale", init_scale),
    "recovery": ("recovery", recovery),
}


def draw_all(folder: Path) -> list[Path]:
    """Draw the figures that have results; return the files."""
    reports = load(folder)
    files = [
        draw_one(reports, name, folder / f"{name}.png")
        for name, (needed, _) in FIGURES.items()
        if needed is None or needed in reports
    ]
    if {"allreduce", "training_step"} <= reports.keys():
        with plt.rc_context(STYLE):
            sheet = plt.figure(figsize=(8, 3.2), layout="constrained")
            overview(reports, sheet)
            files.append(save(sheet, folder / "overview.png"))
    return files


def draw_one(reports: dict[str, Report], name: str, path: Path) -> Path:
    """Draw one of `FIGURES`; return its file."""
    _, figure_of = FIGURES[name]
    with plt.rc_context(STYLE):
        sheet, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        figure_of(reports, axes)
        return save(sheet, path)


def save(sheet: Figure, path: Path) -> Path:
    for axes in sheet.axes:
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    buffer = BytesIO()
    sheet.savefig(buffer, dpi=DPI)
    plt.close(sheet)
    # 64 colours are enough, in a third of the bytes.
    Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    return path


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    print(*draw_all(results), sep="\n")
