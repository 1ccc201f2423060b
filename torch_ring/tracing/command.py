# SPDX-License-Identifier: Apache-2.0
"""main: the command ``python -m torch_ring.tracing``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch_ring.tracing.page.document import MissingChartsError, draw_page
from torch_ring.tracing.page.recording import NothingToShowError, read_recording

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 1 after a sentence about the error."""
    args = _parse(arguments)
    output: Path = args.output or (
        args.recording / "page.html"
        if args.recording.is_dir()
        else args.recording.with_suffix(".html")
    )
    try:
        recording = read_recording(args.recording)
        title = args.title or f"torch_ring: {args.recording.resolve().name}"
        page = draw_page(recording, title, args.late_ms * 1e3)
        output.write_text(page, encoding="utf-8")  # as its head says
    except (NothingToShowError, MissingChartsError) as error:
        print(f"python -m torch_ring.tracing: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"python -m torch_ring.tracing: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {len(recording.operations)} operations of {len(recording.ranks)} ranks")
    for note in recording.notes:
        print(f"note: {note}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torch_ring.tracing")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="draw timelines and flight-recorder dumps as one HTML page",
        description="Draws a timeline (TORCH_RING_TIMELINE), flight-recorder dumps, or a folder "
        "of them as one HTML page that needs no network.",
    )
    show.add_argument("recording", type=Path, metavar="DIR", help="the folder, or one file")
    show.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page; default: DIR/page.html"
    )
    show.add_argument("--title", help="the page's title; default: the folder's name")
    show.add_argument(
        "--late-ms",
        type=_milliseconds,
        default=1.0,
        metavar="MS",
        help="milliseconds behind the first rank from which on the last one is marked; default: 1",
    )
    return parser.parse_args(arguments)


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value
