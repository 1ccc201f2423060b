# SPDX-License-Identifier: Apache-2.0
"""draw_page: the recording of a job as one HTML file that needs no network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import TYPE_CHECKING, Any

from torch_ring.tracing.page.analysis import (
    Lateness,
    Step,
    arrivals,
    folds,
    in_words,
    lateness,
    step_times,
)
from torch_ring.tracing.page.recording import Operation, Recording

if TYPE_CHECKING:
    from torch_ring.tracing.page.charts import Entry

__all__ = ["MissingChartsError", "draw_page"]

_HERE = Path(__file__).parent
_MOST_FAILURES = 50  # on the page


class MissingChartsError(ImportError):
    """The library that draws charts is not installed; the text tells how to install it."""


def draw_page(recording: Recording, title: str, late_us: float) -> str:
    """Return the page of a recording.

    Args:
        recording: the operations to draw.
        title: the title of the page.
        late_us: the lag behind the first rank, in microseconds, from which the last one is marked.

    Raises:
        MissingChartsError: Bokeh is not installed.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources

        from torch_ring.tracing.page.charts import (
            draw_steps,
            draw_timeline,
            legend,
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("bokeh", "numpy"):
            raise
        raise MissingChartsError(
            f"the page is drawn with Bokeh, and there is no {error.name} here: pip install "
            "'torch_ring[trace]', or pip install bokeh"
        ) from None
    arrived = arrivals(recording)
    recorded = max(1.0, *(each.finished for each in recording.operations))
    steps = step_times(recording)
    timeline = draw_timeline(recording, arrived, late_us, folds(recording))
    figures: dict[str, Any] = {"timeline": timeline}
    if steps:
        figures["steps"] = draw_steps(steps)
    script, places = components(figures)
    resources = Resources(mode="inline", components=["bokeh", "bokeh-gl"])
    empty = '<p class="empty">nothing of this was recorded</p>'
    return Template((_HERE / "page.html").read_text("utf-8")).substitute(
        title=escape(title),
        style=(_HERE / "page.css").read_text("utf-8"),
        library=resources.render_js(),
        charts=script,
        colors=(_HERE / "page.js").read_text("utf-8"),
        facts=_facts(recording, steps),
        failures=_failures(recording.operations),
        legend=_legend(legend(recording, arrived, late_us)),
        late=_late_table(lateness(recording, arrived, late_us), late_us, recorded),
        notes="".join(f"<li>{escape(note)}</li>" for note in recording.notes),
        sources=escape(", ".join(recording.sources)),
        **{name: places.get(name, empty) for name in ("timeline", "steps")},
    )


def _facts(recording: Recording, steps: list[Step]) -> str:
    """Return the numbers on top of the page."""
    operations = recording.operations
    facts = {
        "ranks": str(len(recording.ranks)),
        "operations": f"{len(operations):,}",
        "recorded": in_words(max(each.finished for each in operations)),
        "bytes of a rank, at most": _bytes(
            max(
                sum(each.bytes for each in operations if each.rank == rank)
                for rank in recording.ranks
            )
        ),
    }
    if steps:
        facts["a step, median"] = in_words(median(each.time for each in steps))
    failed = sum(each.state == "failed" for each in operations)
    unfinished = sum(each.state != "completed" for each in operations) - failed
    facts |= {"failed": f"{failed:,}"} if failed else {}
    facts |= {"not completed": f"{unfinished:,}"} if unfinished else {}
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )


def _legend(entries: list[Entry]) -> str:
    """Return the buttons of the legend."""
    return "".join(
        f'<button type="button" aria-pressed="true" data-tag="{escape(each.tag)}">'
        f'<i style="color:{each.color}">{each.mark}</i>{escape(each.text)}</button>'
        for each in entries
    )


def _failures(operations: list[Operation]) -> str:
    """Return the card of the failed operations, with their errors; empty if none has failed."""
    failed = [each for each in operations if each.state == "failed"]
    if not failed:
        return ""
    with_errors = any(each.error for each in failed)
    rows = [
        f"<tr><td>rank {each.rank}</td><td>{escape(each.kind)} {escape(each.name)}</td>"
        f"<td>{in_words(each.finished)}</td>{_cell('td', each.error) if with_errors else ''}</tr>"
        for each in sorted(failed, key=lambda each: (each.finished, each.rank))[:_MOST_FAILURES]
    ]
    left_out = len(failed) - len(rows)
    more = f"<p>and {left_out:,} more</p>" if left_out else ""
    where = (
        ""
        if with_errors
        else "<p>A timeline does not keep the errors; dumps of the flight recorder do.</p>"
    )
    return (
        '<section class="card failures"><h2>Failed operations</h2><table><thead><tr><th></th>'
        f"<th>operation</th><th>at</th>{_cell('th', 'error') if with_errors else ''}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{more}{where}</section>"
    )


def _cell(tag: str, text: str) -> str:
    return f'<{tag} class="error">{escape(text)}</{tag}>'


def _late_table(late: list[Lateness], late_us: float, recorded: float) -> str:
    """Return the table of how often each rank came last; `recorded`: microseconds of the whole."""
    if not any(each.of for each in late):
        return '<p class="empty">one rank alone was recorded: nobody to compare it with</p>'
    most = max(each.waited for each in late)
    rows = []
    for each in late:
        share = each.waited / recorded
        worst = ' class="worst"' if most and each.waited == most else ""
        by = in_words(each.median_lag) if each.times_last else ""
        rows.append(
            f"<tr{worst}><td>rank {each.rank}</td><td>{each.times_last:,} of {each.of:,}</td>"
            f'<td>{by}</td><td class="share"><span style="width:{share * 100:.1f}%"></span>'
            f"{in_words(each.waited)}</td></tr>"
        )
    return (
        f"<table><thead><tr><th></th><th>last by {in_words(late_us)} or more</th><th>median</th>"
        f"<th>others waited</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
