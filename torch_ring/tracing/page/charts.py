# SPDX-License-Identifier: Apache-2.0
"""The charts of a recording: all operations in time, and the times of steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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
    CustomJSTicker,
    CustomJSTickFormatter,
    HoverTool,
    PanTool,
    Range1d,
    RangeTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from torch_ring.tracing.page.analysis import Arrival, Fold, Step, in_words
from torch_ring.tracing.page.recording import Operation, Recording

__all__ = ["MOST_LANES", "Entry", "TimeAxis", "draw_steps", "draw_timeline", "lanes_of", "legend"]

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
UNFINISHED_COLOR = "#d97706"

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

# The axis of time. Its places are milliseconds without what the folds leave out; its labels are
# milliseconds of the recording, and tell at each fold what is left out. `begin`, `end`, `left_out`
# and `text` have an entry for each fold, in order.
AXIS = """
const shifts = [0];
for (const each of left_out) shifts.push(shifts.at(-1) + each);
const folds = begin.map((each, index) => ({
  left: each - shifts[index], right: end[index] - shifts[index + 1], text: text[index],
}));
const width = chart.properties.inner_width.is_unset ? 600 : chart.inner_width;
const said = (fold) => width < 500 ? `…${fold.text}…` : `${fold.text} left out`;
const middle = (fold) => (fold.left + fold.right) / 2;
function words(time) {
  if (whole < 1) return +(time * 1e3).toFixed(3) + " µs";
  if (whole < 1000) return +time.toFixed(4) + " ms";
  return +(time / 1e3).toFixed(7) + " s";
}
"""
# No label touches another one, at any width: those of folds come first, the longest first of all.
TICKS = (
    AXIS
    + """
const {start, end: stop} = cb_data;
const pixel = (stop - start) / width;
const ticks = [], taken = [];
function put(place, label) {
  const [from, to] = [place - start, place - start].map(
    (each, side) => each / pixel + (side ? 1 : -1) * (label.length * 3.2 + 7));
  const is_free = taken.every(([left, right]) => to <= left || right <= from);
  if (!is_free || from < -70 || to > width + 30 || place < start || place > stop) return;
  taken.push([from, to]);
  ticks.push(place);
}
[...folds.keys()].sort((a, b) => left_out[b] - left_out[a]).forEach(
  index => put(middle(folds[index]), said(folds[index])));
const rough = 64 * pixel;
const ten = 10 ** Math.floor(Math.log10(rough));
const step = ten * [1, 2, 5, 10].find(each => each * ten >= rough);
shifts.forEach((shift, index) => {
  const from = Math.max(start, index ? folds[index - 1].right : -Infinity);
  const to = Math.min(stop, index < folds.length ? folds[index].left : Infinity);
  for (let n = Math.ceil((from + shift) / step); n * step <= to + shift; n += 1) {
    put(n * step - shift, words(n * step));
  }
});
return ticks.sort((a, b) => a - b);
"""
)
TICK_IN_WORDS = (
    AXIS
    + """
const inside = folds.find(fold => fold.left < tick && tick < fold.right);
if (inside) return said(inside);
return words(tick + shifts[folds.filter(fold => fold.right <= tick).length]);
"""
)


class TimeAxis:
    """Places of times on the charts: microseconds of the recording become milliseconds there.

    Most of each fold is left out, and marked.
    """

    def __init__(self, folds: Sequence[Fold], whole: float) -> None:
        self.folds = folds
        self.whole = whole  # microseconds
        self._begins = np.array([fold.begin for fold in folds])
        self._shifts = np.cumsum([0.0, *(fold.left_out for fold in folds)])

    def place(self, times: Any) -> Any:
        """Return the places of times, none of which lies inside a fold."""
        times = np.asarray(times, dtype=float)
        return (times - self._shifts[np.searchsorted(self._begins, times)]) / 1e3

    def label(self, chart: Any) -> None:
        """Label the axis of a chart, and draw the rest of each fold as a hatched band."""
        args = {
            "begin": [fold.begin / 1e3 for fold in self.folds],
            "end": [fold.end / 1e3 for fold in self.folds],
            "left_out": [fold.left_out / 1e3 for fold in self.folds],
            "text": [in_words(fold.left_out, digits=3) for fold in self.folds],
            "chart": chart,
            "whole": self.whole / 1e3,
        }
        chart.xaxis.ticker = CustomJSTicker(major_code=TICKS, args=args)
        chart.xaxis.formatter = CustomJSTickFormatter(code=TICK_IN_WORDS, args=args)
        for fold in self.folds:
            left, right = self.place([fold.begin, fold.end])
            chart.add_layout(
                BoxAnnotation(
                    left=left,
                    right=right,
                    fill_color=OTHER_COLOR,
                    fill_alpha=0.06,
                    line_alpha=0.0,
                    hatch_pattern="/",
                    hatch_alpha=0.3,
                    hatch_color=OTHER_COLOR,
                    hatch_scale=8,
                    name="fold",
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


MOST_LANES = 8
_LEAST_LANE = 4  # pixels
_ROW, _LEAST_ROW = 120, 14  # pixels of a rank
_ALL_ROWS = 760  # pixels that the rows share, until they are as low as they may be


def lanes_of(operations: list[Operation], most: int = MOST_LANES) -> list[tuple[int, int]]:
    """Return for each operation its lane, and the number of lanes that share its rank's row then.

    Operations are taken in the order of their submission, and each gets the lowest free lane. When
    none is under way the count begins anew: so an operation that was alone has the whole row. With
    more than `most` at once, operations share lanes. Cost: O(n log n).
    """
    busy: dict[int, list[tuple[float, int]]] = {}
    free: dict[int, list[int]] = {}
    together: dict[int, list[int]] = {}  # indices of the operations since none was under way
    lanes = [0] * len(operations)
    counts = [1] * len(operations)

    def close(rank: int) -> None:
        count = min(most, 1 + max((lanes[index] for index in together[rank]), default=0))
        for index in together[rank]:
            lanes[index], counts[index] = lanes[index] % most, count
        together[rank], free[rank] = [], []

    for index, each in enumerate(operations):
        ends = busy.setdefault(each.rank, [])
        unused, at_once = free.setdefault(each.rank, []), together.setdefault(each.rank, [])
        while ends and ends[0][0] <= each.submitted:
            heappush(unused, heappop(ends)[1])
        if not ends:
            close(each.rank)
            unused, at_once = free[each.rank], together[each.rank]
        lanes[index] = heappop(unused) if unused else len(ends)
        at_once.append(index)
        heappush(ends, (each.finished, lanes[index]))
    for rank in together:
        close(rank)
    return list(zip(lanes, counts, strict=True))


_FIRST_BARS = 300  # of a rank, that the chart shows at first: with more, they touch one another
_OVERVIEW_BINS = 600  # bins of the overview strip
_LEAST_BAR = 3  # pixels
# A narrow bar lies under its mark, and under those of others: one of them is enough.
_TIMELINE_HOVER = """
<div class="hover">
  <style>div:has(> .hover) ~ div:has(> .hover) { display: none; }</style>
  <b>@name</b>
  <span>@kind on rank @rank, set @set, number @sequence @state</span>
  <span>@bytes{custom} @dtype @shape</span>
  <span>waited @waited{custom}, moved data for @moved{custom}</span>
  <span>last of the ranks: @last, @lag{custom} behind the first</span>
  <span class="error">@error</span>
</div>
"""


class _Rows:
    """Places on the chart of ranks: each rank has a row of height 1, the first one on top."""

    def __init__(self, recording: Recording) -> None:
        self.of_rank = {rank: index for index, rank in enumerate(recording.ranks)}
        share = _ALL_ROWS // len(self.of_rank)
        self.pixels = max(_LEAST_ROW, min(_ROW, share))
        most = max(1, min(MOST_LANES, int(0.9 * self.pixels) // _LEAST_LANE))
        self.lanes = lanes_of(recording.operations, most)

    def label(self, chart: Any) -> None:
        middles = {index + 0.5: f"rank {rank}" for rank, index in self.of_rank.items()}
        chart.yaxis.ticker = list(middles)
        chart.yaxis.major_label_overrides = middles
        chart.ygrid.ticker = list(range(len(self.of_rank) + 1))


def draw_timeline(
    recording: Recording, arrived: list[Arrival | None], late_us: float, folds: Sequence[Fold]
) -> Any:
    """Return the chart of all operations: ranks as rows, a bar for each.

    Marks: of bars too narrow to be seen, of late ranks, and of operations that did not complete.
    """
    operations = recording.operations
    whole = max(1.0, *(each.finished for each in operations))
    axis = TimeAxis(folds, whole)
    rows = _Rows(recording)
    end = float(axis.place(whole))
    chart = new_chart(
        height=rows.pixels * len(rows.of_rank) + 50,
        x_range=Range1d(0, _first_window(recording, axis, end), bounds=(-end * 0.02, end * 1.02)),
        y_range=Range1d(len(rows.of_rank), 0),
        output_backend="webgl",
        name="timeline",
    )
    axis.label(chart)
    rows.label(chart)
    by_kind: defaultdict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(operations):
        by_kind[each.kind].append(index)
    hovered = []
    for kind, indices in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        columns = _columns(recording, arrived, indices, rows, axis)
        source = ColumnDataSource(columns, name=f"operations {kind}")
        color = COLORS.get(kind, OTHER_COLOR)
        look = {"source": source, "color": color}
        ends = {"bottom": "bottom", "top": "top"}
        waiting = chart.quad(
            "submitted", "started", fill_alpha=0.25, line_alpha=0.35, **ends, **look
        )
        moving = chart.quad(
            "started", "finished", line_alpha=0.0, name=f"bars {kind}", **ends, **look
        )
        marks = chart.rect(
            "middle",
            "height_middle",
            width={"value": _LEAST_BAR, "units": "screen"},
            height="height",
            line_alpha=0.0,
            name=f"marks {kind}",
            **look,
        )
        for each in (waiting, moving, marks):
            each.tags = [kind]
            hovered.append(each)
    _mark_late(chart, recording, arrived, late_us, rows, axis)
    _mark_ends(chart, operations, rows, axis)
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
    overview = _overview(chart, recording, arrived, axis, end)
    return column(chart, overview, sizing_mode="stretch_width")


def legend(recording: Recording, arrived: list[Arrival | None], late_us: float) -> list[Entry]:
    """Return the entries of the chart's legend, the most frequent kind of operation first."""
    kinds = Counter(each.kind for each in recording.operations).most_common()
    late = any(each is not None and each.lag >= late_us for each in arrived)
    states = {_end_of(each) for each in recording.operations}
    return [
        *(Entry(kind, kind, COLORS.get(kind, OTHER_COLOR), "■") for kind, _ in kinds),
        *([Entry("late", "came last", LATE_COLOR, "▼")] if late else []),
        *(Entry(end, end, color, mark) for end, (color, mark, _) in ENDS.items() if end in states),
    ]


@dataclass(frozen=True)
class Entry:
    """An entry of the legend; `tag`: of the chart's bars or marks that it hides and shows."""

    tag: str
    text: str
    color: str
    mark: str


# Operations that did not complete: color and mark in the legend, and the mark of the chart.
ENDS = {
    "failed": (LATE_COLOR, "✖", "circle_x"),
    "not completed": (UNFINISHED_COLOR, "◆", "diamond"),
}


def _end_of(operation: Operation) -> str:
    if operation.state in ("completed", "failed"):
        return operation.state
    return "not completed"


def _mark_ends(chart: Any, operations: list[Operation], rows: _Rows, axis: TimeAxis) -> None:
    """Mark where operations failed, and where the recording left those that did not complete."""
    for end, (color, _, marker) in ENDS.items():
        chosen = [index for index, each in enumerate(operations) if _end_of(each) == end]
        if not chosen:
            continue
        ended = [operations[index] for index in chosen]
        columns = {
            "x": axis.place([each.finished for each in ended]),
            "y": _heights(rows, operations, chosen)["height_middle"],
            "name": [f"{each.kind} {each.name}" for each in ended],
            "rank": [each.rank for each in ended],
            "error": [each.error for each in ended],
        }
        marks = chart.scatter(
            "x",
            "y",
            source=ColumnDataSource(columns),
            marker=marker,
            size=15,
            line_width=2,
            line_color="white",
            fill_color=color,
            name=end,
        )
        marks.tags = [end]
        chart.add_tools(
            HoverTool(
                renderers=[marks],
                tooltips=f'<div class="hover"><b>@name</b><span> {end} on rank @rank</span> '
                '<span class="error">@error</span></div>',
            )
        )


def _first_window(recording: Recording, axis: TimeAxis, end: float) -> float:
    """Return until when the chart shows at first, in milliseconds: few enough bars to see them."""
    bars = _FIRST_BARS * len(recording.ranks)
    if len(recording.operations) <= 2 * bars:
        return end * 1.005  # the marks of the last ends, too
    return float(axis.place(max(recording.operations[bars].submitted, 1.0)))


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
    axis.label(strip)
    strip.yaxis.ticker.desired_num_ticks = 2
    strip.ygrid.visible = False
    frame = RangeTool(x_range=chart.x_range)
    frame.overlay.fill_color = COLORS["allreduce"]
    frame.overlay.fill_alpha = 0.18
    strip.add_tools(frame)
    return strip


def _heights(rows: _Rows, operations: list[Operation], indices: list[int]) -> dict[str, Any]:
    """Return the columns of the bars' places on the y axis."""
    lanes, counts = np.array([rows.lanes[index] for index in indices], dtype=float).T
    row = np.array([rows.of_rank[operations[index].rank] for index in indices], dtype=float)
    top, height = row + 0.05 + 0.9 / counts * lanes, 0.9 / counts * (1 - 0.08 * (counts > 1))
    columns = {
        "top": top,
        "bottom": top + height,
        "height_middle": top + height / 2,
        "height": height,
    }
    return {name: column.astype(np.float32) for name, column in columns.items()}


def _columns(
    recording: Recording,
    arrived: list[Arrival | None],
    indices: list[int],
    rows: _Rows,
    axis: TimeAxis,
) -> dict[str, Any]:
    """Return the columns of the bars; positions in milliseconds, other times in microseconds."""
    chosen = [recording.operations[index] for index in indices]
    arrivals = [arrived[index] for index in indices]
    started = axis.place([each.started for each in chosen])
    finished = axis.place([each.finished for each in chosen])
    return {
        "submitted": axis.place([each.submitted for each in chosen]),
        "started": started,
        "finished": finished,
        "middle": (started + finished) / 2,
        **_heights(rows, recording.operations, indices),
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
    rows: _Rows,
    axis: TimeAxis,
) -> None:
    """Draw a red triangle where the last rank reached an operation that waited for it."""
    late = [
        (operation.submitted, rows.of_rank[operation.rank])
        for operation, arrival in zip(recording.operations, arrived, strict=True)
        if arrival and arrival.last == operation.rank and arrival.lag >= late_us
    ]
    columns = {"x": axis.place([x for x, _ in late]), "y": np.array([y for _, y in late])}
    marks = chart.scatter(
        "x",
        "y",
        source=ColumnDataSource(columns),
        marker="inverted_triangle",
        size=9,
        color=LATE_COLOR,
        name="late",
    )
    marks.tags = ["late"]


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
