# SPDX-License-Identifier: Apache-2.0
"""The page in a browser: it draws without a network, and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import wait_for
from recordings import MILLISECOND, timeline_events, write_timeline

from torch_ring.tracing.command import main

pytest.importorskip("torch_ring.tracing.page.charts", reason="bokeh is not installed")
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


# Labels of the x axis of a chart.
_LABELS = """
const chart = Bokeh.documents[0].get_model_by_name("timeline");
const [axis] = chart.below;
const ticks = axis.ticker.get_ticks(chart.x_range.start, chart.x_range.end, chart.x_range, 0).major;
return axis.formatter.doFormat(ticks, {loc: 0});
"""


def open_page(chromium: Any, folder: Path, events: list[dict[str, Any]]) -> None:
    write_timeline(folder / "timeline.json", events)
    assert main(["show", str(folder)]) == 0
    chromium.get((folder / "page.html").as_uri())
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

    assert "497 ms left out" in chromium.execute_script(_LABELS)
    zoomed = "Bokeh.documents[0].get_model_by_name('timeline').x_range.setv({start: 20, end: 40})"
    chromium.execute_script(zoomed)
    assert "520 ms" in chromium.execute_script(_LABELS)  # of the recording

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
