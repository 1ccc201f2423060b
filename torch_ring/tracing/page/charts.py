"""The charts of a recording: all operations in time, and the times of steps."""

from __future__ import annotations

import math
from collections import defaultdict
from heapq import heappop, heappush
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    BasicTicker,
    BoxAnnotation,
    BoxZoomTool,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    HoverTool,
    Label,
    PanTool,
    Range1d,
    RangeTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from torch_ring.tracing.page.analysis import Arrival, Gap, Step
from torch_ring.tracing.page.recording import Operation, Recording

__all__ = ["MOST_LANES", "draw_steps", "draw_timeline", "lanes_of"]

# One color a kind, distinguishable by color-blind readers, on white and on black.
COLORS = {
    "allreduce": "#3b82f6",
    "broadcast": "#e69f00",
    "allgather": "#10a37f",
    "alltoall": "#a855f7",
    "reducescatter": "#22b8cf",
    "reduce": "#7c83fd",
    "gather": "#84a834",
    "scatter": "#c98f65",
    "barrier": "#8793a6",
    "fence": "#8793a6",
    "join": "#8793a6",
}
OTHER_COLOR = "#8793a6"
LATE_COLOR = "#e5484d"

LOOK: dict[str, Any] = {
    "sizing_mode": "stretch_width",
    "min_border_left": 76,
    "background_fill_alpha": 0.0,
    "border_fill_alpha": 0.0,
    "outline_line_alpha": 0.0,
}

BYTES_IN_WORDS = """
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
let unit = 0;
let number = value;
while (number >= 1024 && unit < 4) { number /= 1024; unit += 1; }
const digits = unit && number < 100 && number % 1 ? 1 : 0;
return number.toFixed(digits) + " " + units[unit];
"""
MICROSECONDS_IN_WORDS = """
if (!(value >= 0)) return "an unknown time";
if (value < 1000) return value.toFixed(0) + " µs";
if (value < 1e6) return (value / 1e3).toFixed(2) + " ms";
return (value / 1e6).toFixed(3) + " s";
"""

# Milliseconds of the chart, which are earlier than those of the recording after a fold.
TICK_IN_WORDS = """
const time = tick > fold_begin ? tick + fold_length : tick;
const far = Math.max(...ticks) + fold_length;
if (far < 1) return (time * 1e3).toFixed(0) + " µs";
if (far < 1e4) return +time.toFixed(3) + " ms";
return +(time / 1e3).toFixed(4) + " s";
"""


class TimeAxis:
    """Places of times on the charts: microseconds of the recording become milliseconds there.

    Most of the gap before the first step is folded: left out, and marked.
    """

    def __init__(self, gap: Gap | None) -> None:
        self.gap = gap
        self.fold_length = 0.0  # milliseconds
        if gap is not None:
            most = 0.9 * (gap.end - gap.begin) / 1e3
            unit = 10.0 ** math.floor(math.log10(most)) / 2  # or ticks would have long numbers
            self.fold_length = most // unit * unit

    def place(self, times: Any) -> Any:
        """Return the places of an array of times, none of which lies inside the gap."""
        times = np.asarray(times, dtype=float)
        if self.gap is None:
            return times / 1e3
        return times / 1e3 - self.fold_length * (times > self.gap.begin)

    def formatter(self) -> Any:
        begin = 0.0 if self.gap is None else self.gap.begin / 1e3
        fold = {"fold_begin": begin, "fold_length": self.fold_length}
        return CustomJSTickFormatter(code=TICK_IN_WORDS, args=fold)

    def mark_fold(self, chart: Any, middle: float) -> None:
        """Draw the rest of the gap as a hatched band; `middle`: of the label, on the y axis."""
        if self.gap is None:
            return
        left, right = self.place([self.gap.begin, self.gap.end])
        look = {"fill_alpha": 0.0, "line_alpha": 0.0, "hatch_pattern": "/", "hatch_alpha": 0.35}
        chart.add_layout(
            BoxAnnotation(left=left, right=right, hatch_color=OTHER_COLOR, name="fold", **look)
        )
        folded = self.fold_length
        chart.add_layout(
            Label(
                x=(left + right) / 2,
                y=middle,
                text=f"{folded / 1e3:g} s left out" if folded >= 1e4 else f"{folded:g} ms left out",
                angle=math.pi / 2,
                text_align="center",
                text_baseline="middle",
                text_font_size="11px",
                text_color=OTHER_COLOR,
            )
        )


def new_chart(**options: Any) -> Any:
    """Return an empty chart, as wide as the page, whose wheel zooms in time."""
    wheel = WheelZoomTool(dimensions="width")
    chart = figure(
        tools=[PanTool(), wheel, BoxZoomTool(dimensions="width"), ResetTool()],
        active_scroll=wheel,
        toolbar_location="right",
        **LOOK,
        **options,
    )
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    return chart


def put_legend_above(chart: Any) -> None:
    """Put the legend above the chart; a click on an entry hides its bars or line."""
    chart.legend.click_policy = "hide"
    chart.legend.orientation = "horizontal"
    chart.legend.location = "left"
    chart.legend.ncols = 3  # so that a phone shows all of them
    chart.add_layout(chart.legend[0], "above")


MOST_LANES = 8  # with more, a hundred broadcasts at the start would make all later bars thin


def lanes_of(operations: list[Operation]) -> tuple[list[int], dict[int, int]]:
    """Return the lane of each operation, and the number of lanes of each rank.

    Operations are taken in the order of their submission. Each gets the lowest free lane, so a rank
    has as many lanes as it had operations in flight at once, at most MOST_LANES; beyond that,
    operations share lanes. Cost: O(n log n).
    """
    busy: dict[int, list[tuple[float, int]]] = {}
    free: dict[int, list[int]] = {}
    count: dict[int, int] = {}
    lanes = []
    for each in operations:
        ends, unused = busy.setdefault(each.rank, []), free.setdefault(each.rank, [])
        while ends and ends[0][0] <= each.submitted:
            heappush(unused, heappop(ends)[1])
        if unused:
            lane = heappop(unused)
        else:
            lane = count.get(each.rank, 0)
            count[each.rank] = lane + 1
        heappush(ends, (each.finished, lane))
        lanes.append(lane)
    shown = {rank: min(lanes_of_rank, MOST_LANES) for rank, lanes_of_rank in count.items()}
    return [lane % MOST_LANES for lane in lanes], shown


_FIRST_BARS = 2000  # most bars that the chart shows at first
_OVERVIEW_BINS = 600  # bins of the overview strip
_TIMELINE_HOVER = """
<div class="hover">
  <b>@name</b>
  <span>@kind on rank @rank, set @set, number @sequence @state</span>
  <span>@bytes{custom} @dtype @shape</span>
  <span>waited @waited{custom}, moved data for @moved{custom}</span>
  <span>last of the ranks: @last, @lag{custom} behind the first</span>
  <span class="error">@error</span>
</div>
"""


def draw_timeline(
    recording: Recording, arrived: list[Arrival | None], late_us: float, gap: Gap | None
) -> Any:
    """Return the chart of all operations: ranks as rows, a bar for each, the late ones marked."""
    axis = TimeAxis(gap)
    operations = recording.operations
    lanes, lane_counts = lanes_of(operations)
    # A rank's row has height 1, which its lanes share. The first rank is on top.
    rows = {rank: index for index, rank in enumerate(recording.ranks)}
    end = float(axis.place(max(1.0, *(each.finished for each in operations))))
    chart = new_chart(
        height=max(220, min(60 * len(rows) + 90, 900)),
        x_range=Range1d(0, _first_window(operations, axis, end), bounds=(-end * 0.02, end * 1.02)),
        y_range=Range1d(len(rows), -0.15),
        output_backend="webgl",
        name="timeline",
    )
    chart.xaxis.formatter = axis.formatter()
    chart.yaxis.ticker = [index + 0.45 for index in rows.values()]
    chart.yaxis.major_label_overrides = {
        index + 0.45: f"rank {rank}" for rank, index in rows.items()
    }
    by_kind: defaultdict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(operations):
        by_kind[each.kind].append(index)
    hovered = []
    for kind, indices in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        columns = _columns(recording, arrived, indices, lanes, lane_counts, rows, axis)
        source = ColumnDataSource(columns, name=f"operations {kind}")
        color = COLORS.get(kind, OTHER_COLOR)
        # One-pixel outlines keep narrower bars visible.
        look = {"source": source, "bottom": "bottom", "top": "top", "color": color}
        waiting = chart.quad("submitted", "started", fill_alpha=0.25, line_alpha=0.35, **look)
        moving = chart.quad("started", "finished", legend_label=kind, name=f"bars {kind}", **look)
        hovered += [waiting, moving]
    _mark_late(chart, recording, arrived, late_us, rows, axis)
    axis.mark_fold(chart, len(rows) / 2)
    chart.add_tools(
        HoverTool(
            renderers=hovered,
            tooltips=_TIMELINE_HOVER,
            formatters={
                "@bytes": CustomJSHover(code=BYTES_IN_WORDS),
                "@waited": CustomJSHover(code=MICROSECONDS_IN_WORDS),
                "@moved": CustomJSHover(code=MICROSECONDS_IN_WORDS),
                "@lag": CustomJSHover(code=MICROSECONDS_IN_WORDS),
            },
        )
    )
    chart.ygrid.visible = False
    put_legend_above(chart)
    overview = _overview(chart, recording, arrived, axis, end)
    return column(chart, overview, sizing_mode="stretch_width")


def _first_window(operations: list[Operation], axis: TimeAxis, end: float) -> float:
    """Return until when the chart shows at first, in milliseconds: few enough bars to see them."""
    if len(operations) <= 2 * _FIRST_BARS:
        return end
    return float(axis.place(max(operations[_FIRST_BARS].submitted, 1.0)))


def _overview(
    chart: Any, recording: Recording, arrived: list[Arrival | None], axis: TimeAxis, end: float
) -> Any:
    """Return the strip of the whole time: how late the last rank came; its frame is the chart's."""
    longest = np.zeros(_OVERVIEW_BINS)
    for operation, arrival in zip(recording.operations, arrived, strict=True):
        if arrival is not None and arrival.last == operation.rank:
            place = float(axis.place(operation.submitted)) / end * _OVERVIEW_BINS
            bin_ = min(int(place), _OVERVIEW_BINS - 1)
            longest[bin_] = max(longest[bin_], arrival.lag / 1e3)
    edges = np.linspace(0, end, _OVERVIEW_BINS + 1)
    strip = figure(
        height=96,
        x_range=Range1d(0, end),
        y_range=Range1d(0, max(float(longest.max()) * 1.1, 1.0)),
        y_axis_label="late, ms",
        tools="",
        toolbar_location=None,
        name="overview",
        **LOOK,
    )
    columns = {"left": edges[:-1], "right": edges[1:], "top": longest}
    strip.quad("left", "right", "top", source=ColumnDataSource(columns), bottom=0, color=LATE_COLOR)
    strip.xaxis.formatter = axis.formatter()
    strip.yaxis.ticker.desired_num_ticks = 2
    strip.ygrid.visible = False
    frame = RangeTool(x_range=chart.x_range)
    frame.overlay.fill_color = COLORS["allreduce"]
    frame.overlay.fill_alpha = 0.18
    strip.add_tools(frame)
    return strip


def _columns(
    recording: Recording,
    arrived: list[Arrival | None],
    indices: list[int],
    lanes: list[int],
    lane_counts: dict[int, int],
    rows: dict[int, int],
    axis: TimeAxis,
) -> dict[str, Any]:
    """Return the columns of the bars; positions in milliseconds, other times in microseconds."""
    chosen = [recording.operations[index] for index in indices]
    arrivals = [arrived[index] for index in indices]
    height = np.array([0.9 / lane_counts[each.rank] for each in chosen])
    row = np.array([rows[each.rank] for each in chosen], dtype=float)
    top = row + height * np.array([lanes[index] for index in indices])
    return {
        "submitted": axis.place([each.submitted for each in chosen]),
        "started": axis.place([each.started for each in chosen]),
        "finished": axis.place([each.finished for each in chosen]),
        "top": top,
        "bottom": top + height * 0.92,
        "name": [each.name for each in chosen],
        "kind": [each.kind for each in chosen],
        "rank": np.array([each.rank for each in chosen], dtype=np.int32),
        "set": [each.process_set for each in chosen],
        # Floats, as in JavaScript: operations in a dump without an agreement have numbers > 2**40.
        "sequence": np.array([each.sequence for each in chosen], dtype=np.float64),
        "bytes": np.array([each.bytes for each in chosen], dtype=float),
        "dtype": [each.dtype for each in chosen],
        "shape": [each.shape for each in chosen],
        "state": ["" if each.state == "completed" else f"({each.state})" for each in chosen],
        "error": [each.error for each in chosen],
        "waited": np.array([each.started - each.submitted for each in chosen], dtype=np.float32),
        "moved": np.array([each.finished - each.started for each in chosen], dtype=np.float32),
        "last": ["?" if each is None else str(each.last) for each in arrivals],
        "lag": np.array(
            [-1.0 if each is None else each.lag for each in arrivals], dtype=np.float32
        ),
    }


def _mark_late(
    chart: Any,
    recording: Recording,
    arrived: list[Arrival | None],
    late_us: float,
    rows: dict[int, int],
    axis: TimeAxis,
) -> None:
    """Draw a red triangle where the last rank reached an operation that waited for it."""
    late = [
        (operation.submitted, rows[operation.rank] - 0.04)
        for operation, arrival in zip(recording.operations, arrived, strict=True)
        if arrival and arrival.last == operation.rank and arrival.lag >= late_us
    ]
    columns = {"x": axis.place([x for x, _ in late]), "y": np.array([y for _, y in late])}
    chart.scatter(
        "x",
        "y",
        source=ColumnDataSource(columns),
        marker="inverted_triangle",
        size=9,
        color=LATE_COLOR,
        legend_label="came last",
        name="late",
    )


def draw_steps(steps: list[Step]) -> Any:
    """Return the chart of the time of each step."""
    chart = new_chart(
        height=300,
        x_axis_label="step",
        y_axis_label="milliseconds",
        output_backend="webgl",
        name="steps",
    )
    columns = {
        "step": [each.number for each in steps],
        "time": [each.time / 1e3 for each in steps],
        "last": [each.last for each in steps],
    }
    look = {"source": ColumnDataSource(columns), "color": COLORS["allreduce"]}
    chart.line("step", "time", line_width=1.5, **look)
    points = chart.scatter("step", "time", size=5 if len(steps) < 300 else 2, **look)
    chart.xaxis.ticker = BasicTicker(min_interval=1)  # no half steps
    chart.y_range.start = 0
    chart.add_tools(
        HoverTool(
            renderers=[points],
            tooltips='<div class="hover"><b>step @step</b><span>@time{0.00} ms; rank @last came '
            "last to it</span></div>",
        )
    )
    return chart
