"""The charts of sizes, bandwidth and steps."""

from __future__ import annotations

from typing import Any

from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    CustomJSTickFormatter,
    FactorRange,
    HoverTool,
    LogTicker,
)

from torch_ring.tracing.page.analysis import SizeClass
from torch_ring.tracing.page.look import (
    BYTES_IN_WORDS,
    COLORS,
    OTHER_COLOR,
    RANK_COLORS,
    new_chart,
    put_legend_above,
    size_in_words,
)

__all__ = ["draw_bandwidth", "draw_sizes", "draw_steps"]


def draw_sizes(classes: list[SizeClass]) -> Any:
    """Return the chart of the bytes that each size of operation moved, by kind."""
    labels = [size_in_words(size) for size in sorted({each.bytes for each in classes})]
    chart = new_chart(
        height=300,
        x_range=FactorRange(*labels),
        x_axis_label="bytes of an operation, from",
        y_axis_label="bytes in all",
        name="sizes",
    )
    kinds = sorted({each.kind for each in classes})
    columns: dict[str, Any] = {"size": labels}
    for kind in kinds:
        columns[kind] = [0.0] * len(labels)
        columns[f"{kind} count"] = [0] * len(labels)
    for each in classes:
        place = labels.index(size_in_words(each.bytes))
        columns[each.kind][place] = float(each.total_bytes)
        columns[f"{each.kind} count"][place] = each.count
    chart.vbar_stack(
        kinds,
        x="size",
        width=0.8,
        source=ColumnDataSource(columns),
        color=[COLORS.get(kind, OTHER_COLOR) for kind in kinds],
        legend_label=kinds,
    )
    hover = "".join(f"<span>{k}: @{{{k} count}}, @{{{k}}}{{0.0b}}</span>" for k in kinds)
    chart.add_tools(HoverTool(tooltips=f'<div class="hover"><b>from @size</b>{hover}</div>'))
    chart.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2**i for i in range(10)])
    chart.yaxis.formatter = CustomJSTickFormatter(code=f"const value = tick;{BYTES_IN_WORDS}")
    chart.xaxis.major_label_orientation = 0.9
    put_legend_above(chart)
    return chart


def draw_bandwidth(classes: list[SizeClass]) -> Any:
    """Return the chart of the median bandwidth of each size of operation, by kind."""
    chart = new_chart(
        height=300,
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="bytes of an operation",
        y_axis_label="a second",
        name="bandwidth",
    )
    hovered = []
    for kind in sorted({each.kind for each in classes}):
        points = [each for each in classes if each.kind == kind and each.bandwidth > 0]
        if not points:
            continue
        columns = {
            "bytes": [each.bytes for each in points],
            "from": [size_in_words(each.bytes) for each in points],
            "rate": [each.bandwidth for each in points],
            "count": [each.count for each in points],
        }
        source = ColumnDataSource(columns)
        color = COLORS.get(kind, OTHER_COLOR)
        chart.line("bytes", "rate", source=source, color=color, line_width=2, legend_label=kind)
        hovered.append(
            chart.scatter("bytes", "rate", source=source, color=color, size=8, legend_label=kind)
        )
    chart.add_tools(
        HoverTool(
            renderers=hovered,
            tooltips='<div class="hover"><b>from @from</b><span>@rate{0.0b}/s, the median of '
            "@count</span></div>",
        )
    )
    for axis in (chart.xaxis, chart.yaxis):
        axis.ticker = LogTicker(base=1024, mantissas=[1, 4, 16, 64, 256])
        axis.formatter = CustomJSTickFormatter(code=f"const value = tick;{BYTES_IN_WORDS}")
    if hovered:
        put_legend_above(chart)
    return chart


def draw_steps(times: dict[int, list[tuple[int, float]]]) -> Any:
    """Return the chart of the time of each step, a line for each rank."""
    chart = new_chart(
        height=300,
        x_axis_label="step",
        y_axis_label="milliseconds",
        output_backend="webgl",
        name="steps",
    )
    hovered = []
    for index, (rank, pairs) in enumerate(times.items()):
        columns = {
            "step": [step for step, _ in pairs],
            "time": [time / 1e3 for _, time in pairs],
            "rank": [rank] * len(pairs),
        }
        look = {
            "source": ColumnDataSource(columns),
            "color": RANK_COLORS[index % len(RANK_COLORS)],
            "legend_label": f"rank {rank}",
        }
        chart.line("step", "time", line_width=1.5, **look)
        hovered.append(chart.scatter("step", "time", size=5 if len(pairs) < 300 else 2, **look))
    chart.y_range.start = 0
    chart.add_tools(
        HoverTool(
            renderers=hovered,
            tooltips='<div class="hover"><b>step @step</b><span>rank @rank: @time{0.00} '
            "ms</span></div>",
        )
    )
    put_legend_above(chart)
    return chart
