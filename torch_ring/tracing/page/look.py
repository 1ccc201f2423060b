"""How all charts look: their colors, their words for numbers, their tools."""

from __future__ import annotations

from typing import Any

from bokeh.models import BoxZoomTool, PanTool, ResetTool, WheelZoomTool
from bokeh.plotting import figure

__all__ = [
    "BYTES_IN_WORDS",
    "COLORS",
    "LATE_COLOR",
    "LOOK",
    "MICROSECONDS_IN_WORDS",
    "OTHER_COLOR",
    "RANK_COLORS",
    "TICK_IN_WORDS",
    "new_chart",
    "put_legend_above",
    "size_in_words",
]

# One color a kind, told apart also by those who see no red or no green, on white and on black.
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
RANK_COLORS = ("#3b82f6", "#e69f00", "#10a37f", "#a855f7", "#22b8cf", "#c98f65", "#84a834")

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

TICK_IN_WORDS = """
const far = Math.max(...ticks);
if (far < 1) return (tick * 1e3).toFixed(0) + " µs";
if (far < 1e4) return +tick.toFixed(3) + " ms";
return +(tick / 1e3).toFixed(4) + " s";
"""


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
    """Put the legend over the chart; a click on an entry hides what it stands for."""
    chart.legend.click_policy = "hide"
    chart.legend.orientation = "horizontal"
    chart.legend.location = "left"
    chart.add_layout(chart.legend[0], "above")


def size_in_words(count: int) -> str:
    """Return 64 KiB for 65536."""
    unit = 0
    while count >= 1024 and count % 1024 == 0:
        count >>= 10
        unit += 1
    return f"{count} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"
