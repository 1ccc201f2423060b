"""The page in a browser: it draws without a network, and answers."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import MILLISECOND, failed_dump, timeline_events, write_timeline

from torch_ring.tracing.command import main

pytestmark = pytest.mark.browser
DEADLINE_S = 600  # a hang, not a slow machine

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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium, or no chromedriver: apt-get install chromium-driver")
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage window-size=1400,1600"
    )
    for flag in [*flags.split(), f"user-data-dir={folder}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chromium.command_executor.client_config.timeout = DEADLINE_S  # of an answer of the driver
    chromium.set_page_load_timeout(DEADLINE_S)
    chromium.set_script_timeout(DEADLINE_S)
    yield chromium
    chromium.quit()


def wait_for(chromium: Any, condition: Callable[[Any], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(chromium, DEADLINE_S).until(condition)


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

    ticks = (
        "return Bokeh.documents[0].get_model_by_name('timeline').below[0].formatter"
        ".doFormat([0, 1, 100], {loc: 0})"
    )
    assert chromium.execute_script(ticks) == ["0 ms", "1 ms", "500 ms"]

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
def test_nothing_overflows_a_narrow_screen(chromium: Any, tmp_path: Path) -> None:
    narrow = {"width": 480, "height": 900, "deviceScaleFactor": 2, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        write_timeline(tmp_path / "timeline.json", timeline_events(steps=6))
        (tmp_path / "flight_0").write_bytes(pickle.dumps(failed_dump()))
        for file in ("timeline.json", "flight_0"):
            open_recording(chromium, tmp_path / file)
            width = "return document.documentElement.scrollWidth"
            assert chromium.execute_script(width) == 480
        assert chromium.find_elements("css selector", ".failures")
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_bars_far_into_a_long_recording_answer(chromium: Any, tmp_path: Path) -> None:
    steps = 3000
    open_page(chromium, tmp_path, timeline_events(steps))
    assert counted(chromium) == steps * 3 * 2
    assert "gradients.0.7.0.0" in hover_over(chromium, "gradients.0.7.0.0")
    # The frame of the strip moves.
    chromium.execute_script(
        "const range = Bokeh.documents[0].get_model_by_name('timeline').x_range;"
        "range.setv({start: 40000, end: 40200})"
    )
    assert "gradients.0.2005.0.0" in hover_over(chromium, "gradients.0.2005.0.0")
