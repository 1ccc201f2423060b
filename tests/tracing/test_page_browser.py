# SPDX-License-Identifier: Apache-2.0
"""The page in a browser: it draws without a network, and answers."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import wait_for
from recordings import MILLISECOND, failed_dump, timeline_events, write_timeline

from torch_ring.tracing.command import main

charts = pytest.importorskip("torch_ring.tracing.page.charts", reason="bokeh is not installed")
COLORS, LATE_COLOR = charts.COLORS, charts.LATE_COLOR

pytestmark = pytest.mark.browser

# Searches the shadow trees, too, in which Bokeh draws.
_DEEP = """
const found = [];
const walk = (root) => {
  for (const each of root.querySelectorAll("*")) {
    if (each.matches(arguments[0])) found.push(each);
    if (each.shadowRoot) walk(each.shadowRoot);
  }
};
walk(document);
return found;
"""
_PLACE = """
const [name, left, right] = arguments;
const page = Bokeh.documents[0];
const model = page.get_model_by_name("timeline");
const view = [...Bokeh.index.roots].map(each => Bokeh.index.find_one(model)).filter(Boolean)[0];
const source = page.get_model_by_name(name).data_source;
const index = source.get("name").indexOf(arguments[3]);
const middle = (source.get(left)[index] + source.get(right)[index]) / 2;
const height = (source.get("top")[index] + source.get("bottom")[index]) / 2;
const frame = view.canvas_view.el.getBoundingClientRect();
return [
  frame.x + view.frame.x_scale.compute(middle), frame.y + view.frame.y_scale.compute(height),
];
"""


# Labels of the x axis of a chart: their text, and where they begin and end on the page.
_LABELS = """
const [name] = arguments;
const chart = Bokeh.documents[0].get_model_by_name(name);
const view = [...Bokeh.index.roots].map(each => Bokeh.index.find_one(chart)).filter(Boolean)[0];
const [axis] = chart.below;
const ticks = axis.ticker.get_ticks(chart.x_range.start, chart.x_range.end, chart.x_range, 0).major;
const context = document.createElement("canvas").getContext("2d");
context.font = `${axis.major_label_text_font_size} ${axis.major_label_text_font}`;
const left = view.canvas_view.el.getBoundingClientRect().x;
return axis.formatter.doFormat(ticks, {loc: 0}).map((text, index) => {
  const middle = left + view.frame.x_scale.compute(ticks[index]);
  const half = context.measureText(text).width / 2;
  return [text, middle - half, middle + half];
});
"""
# Numbers of pixels of a color around a place of the page: those in a row of it, and all.
_PIXELS = """
const [x, y, reach, color] = arguments;
const chart = Bokeh.documents[0].get_model_by_name("timeline");
const view = [...Bokeh.index.roots].map(each => Bokeh.index.find_one(chart)).filter(Boolean)[0];
const frame = view.canvas_view.el.getBoundingClientRect();
const canvas = view.canvas_view.primary.canvas;
const ratio = canvas.width / frame.width;
const side = Math.round(2 * reach * ratio);
const {data} = canvas.getContext("2d").getImageData(
  Math.round((x - frame.x - reach) * ratio), Math.round((y - frame.y - reach) * ratio), side, side);
const wanted = [1, 3, 5].map(each => parseInt(color.slice(each, each + 2), 16));
const has = (index) => data[4 * index + 3] > 200 && wanted.every(
  (each, channel) => Math.abs(data[4 * index + channel] - each) < 24);
const indices = [...Array(side * side).keys()];
const middle = Math.floor(side / 2) * side;
return [
  indices.slice(middle, middle + side).filter(has).length / ratio,
  indices.filter(has).length / ratio / ratio,
];
"""


def open_page(chromium: Any, folder: Path, events: list[dict[str, Any]]) -> None:
    write_timeline(folder / "timeline.json", events)
    open_recording(chromium, folder)


def open_recording(chromium: Any, recording: Path) -> None:
    page = recording / "page.html" if recording.is_dir() else recording.with_suffix(".html")
    assert main(["show", str(recording)]) == 0
    chromium.get(page.as_uri())
    drawn = "return document.documentElement.dataset.drawn"
    wait_for(chromium, lambda page: page.execute_script(drawn))


def hover_over(chromium: Any, name: str) -> str:
    """Point at the data phase of an allreduce's bar; return the text that the page shows."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    x, y = chromium.execute_script(_PLACE, "bars allreduce", "started", "finished", name)
    actions = ActionBuilder(chromium)
    actions.pointer_action.move_to_location(int(x), int(y)).move_to_location(round(x), round(y))
    actions.perform()
    ActionChains(chromium).move_by_offset(0, 1).perform()

    def text(page: Any) -> str:
        shown = [each.text for each in page.execute_script(_DEEP, ".hover") if each.text]
        return "\n".join(shown)

    return str(wait_for(chromium, text))


def labels(chromium: Any, chart: str) -> list[str]:
    """Return the labels of a chart's axis of time, which must not touch one another."""
    found = chromium.execute_script(_LABELS, chart)
    for (left, _, end), (right, begin, _) in pairwise(found):
        assert end + 2 < begin, (left, right)
    width = chromium.execute_script("return document.documentElement.clientWidth")
    assert all(begin >= 0 and end <= width for _, begin, end in found), found
    return [text for text, _, _ in found]


def counted(chromium: Any) -> int:
    """Return the number of bars in the charts."""
    return chromium.execute_script(
        "return [...Bokeh.documents[0]._all_models.values()]"
        ".filter(each => each.type == 'ColumnDataSource' && /^operations/.test(each.name))"
        ".reduce((sum, each) => sum + each.get('name').length, 0)"
    )


@pytest.mark.slow
def test_the_page_draws_and_hovering_shows_a_bucket(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path, timeline_events(steps=6))
    assert counted(chromium) == 6 * 3 * 2
    assert len(chromium.execute_script(_DEEP, "canvas")) >= 5
    shown = hover_over(chromium, "gradients.0.3.0.0")
    assert "gradients.0.3.0.0" in shown
    assert "allreduce on rank 0" in shown
    assert "4 MiB float32" in shown
    assert "last of the ranks: 1, 5.0" in shown
    late = chromium.execute_script(
        "return [...Bokeh.documents[0].get_model_by_name('late').data_source.get('x')]"
    )
    assert len(late) == 6 * 3
    table = chromium.find_element("css selector", "tr.worst").text.split()
    assert table == ["rank", "1", "18", "of", "18", "5", "ms", "35.9", "ms"]


@pytest.mark.slow
def test_a_page_of_odd_names_after_a_long_start(chromium: Any, tmp_path: Path) -> None:
    """Names are text; the gap is folded; the page needs no network, and has a dark scheme."""
    events = timeline_events(steps=6)
    name = "</script><script>window.ran = 1</script><b>"
    for event in events:
        if event["args"].get("tensor") == "allreduce.gradients.0.1.0.0":
            event["args"]["tensor"] = f"allreduce.{name}"
        if "ts" in event:
            event["ts"] += 500 * MILLISECOND
    args = events[-1]["args"] | {"tensor": "broadcast.weights", "sequence": 100}
    start = {"name": "BROADCAST", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": MILLISECOND}
    open_page(chromium, tmp_path, [*events, start | {"args": args}])

    assert name in hover_over(chromium, name)
    assert chromium.execute_script("return window.ran") is None

    assert "497 ms left out" in labels(chromium, "timeline")
    zoomed = "Bokeh.documents[0].get_model_by_name('timeline').x_range.setv({start: 20, end: 40})"
    chromium.execute_script(zoomed)
    assert "520 ms" in labels(chromium, "timeline")  # place 23: of the recording, not of the chart

    loaded = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    assert [url for url in chromium.execute_script(loaded) if not url.startswith("blob:")] == []
    assert [each for each in chromium.get_log("browser") if each["level"] == "SEVERE"] == []

    look = (
        "return [getComputedStyle(document.body).backgroundColor,"
        "Bokeh.documents[0].get_model_by_name('timeline').below[0].major_label_text_color]"
    )
    light = chromium.execute_script(look)
    chromium.find_element("id", "scheme").click()
    dark = chromium.execute_script(look)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


@pytest.mark.slow
def test_a_narrow_bar_and_a_failure_are_marked(chromium: Any, tmp_path: Path) -> None:
    """Bars of 0.01 ms in 400 ms have three pixels; a click on the legend hides the failures."""
    events = timeline_events(steps=20)
    for event in events:
        if event["name"] == "ALLREDUCE":
            event["dur"] = 10.0
        if event["name"] == "ALLREDUCE" and event["args"]["tensor"].endswith(".7.0.0"):
            event["args"]["state"] = "failed"
    open_page(chromium, tmp_path, events)

    def pixels(name: str, color: str) -> list[float]:
        ends = ("started", "finished", name)
        x, y = chromium.execute_script(_PLACE, "bars allreduce", *ends)
        return chromium.execute_script(_PIXELS, x, y, 8, color)

    assert 2.5 <= pixels("gradients.0.3.0.0", COLORS["allreduce"])[0] <= 4
    assert pixels("gradients.0.7.0.0", LATE_COLOR)[1] > 50
    entries = {each.text: each for each in chromium.find_elements("css selector", ".legend button")}
    assert list(entries) == ["■allreduce", "■allgather", "▼came last", "✖failed"]
    entries["✖failed"].click()
    wait_for(chromium, lambda _: pixels("gradients.0.7.0.0", LATE_COLOR)[1] == 0)
    entries["■allreduce"].click()
    wait_for(chromium, lambda _: pixels("gradients.0.3.0.0", COLORS["allreduce"])[1] == 0)


@pytest.mark.slow
def test_nothing_overflows_a_narrow_screen(chromium: Any, tmp_path: Path) -> None:
    narrow = {"width": 480, "height": 900, "deviceScaleFactor": 2, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        events = timeline_events(steps=12)
        for event in events:  # two evaluations of a second, after a start of ten
            step = int(event.get("ts", 0) // (20 * MILLISECOND))
            if "ts" in event:
                event["ts"] += (10_000 + 1000 * (step > 3) + 1000 * (step > 8)) * MILLISECOND
        args = events[-1]["args"] | {"tensor": "broadcast.weights", "sequence": 100}
        start = {"name": "BROADCAST", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": MILLISECOND}
        write_timeline(tmp_path / "timeline.json", [*events, start | {"args": args}])
        (tmp_path / "flight_0").write_bytes(pickle.dumps(failed_dump()))
        for file in ("timeline.json", "flight_0"):
            open_recording(chromium, tmp_path / file)
            width = "return document.documentElement.scrollWidth"
            assert chromium.execute_script(width) == 480
            on_axis = labels(chromium, "timeline") + labels(chromium, "overview")
            if file == "timeline.json":
                assert {"…10 s…", "…1.01 s…"} <= {*on_axis}
                for start in range(0, 220, 20):
                    chromium.execute_script(
                        "Bokeh.documents[0].get_model_by_name('timeline').x_range"
                        ".setv({start: arguments[0], end: arguments[0] + 33})",
                        start,
                    )
                    assert labels(chromium, "timeline")
        assert chromium.find_elements("css selector", ".failures")
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_bars_far_into_a_long_recording_answer(chromium: Any, tmp_path: Path) -> None:
    steps = 3000
    open_page(chromium, tmp_path, timeline_events(steps))
    assert counted(chromium) == steps * 3 * 2
    end = chromium.execute_script(
        "return Bokeh.documents[0].get_model_by_name('timeline').x_range.end"
    )
    assert 1500 < end < 2500  # of 60 s: bars at first have some pixels each
    assert "gradients.0.7.0.0" in hover_over(chromium, "gradients.0.7.0.0")
    # The frame of the strip moves.
    chromium.execute_script(
        "const range = Bokeh.documents[0].get_model_by_name('timeline').x_range;"
        "range.setv({start: 40000, end: 40200})"
    )
    assert "gradients.0.2005.0.0" in hover_over(chromium, "gradients.0.2005.0.0")
