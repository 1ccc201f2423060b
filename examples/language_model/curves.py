# SPDX-License-Identifier: Apache-2.0
"""Keeps the losses of a run, and draws those of several that ``train.py --json`` has written.

python curves.py 1.json 2.json --output loss.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

LOSSES = ("training loss", "validation loss")


class Curves:
    """Numbers by step: the same on all ranks, and a part of the checkpoint."""

    def __init__(self, ranks: int, tensorboard: Path | None) -> None:
        self.ranks = ranks
        self.points: dict[str, list[list[float]]] = {}  # [step, value], by name
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only --tensorboard needs it

            self.writer = SummaryWriter(tensorboard)

    def add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, []).append([step, value])
        if self.writer:
            self.writer.add_scalar(name, value, step)

    def last(self, *names: str) -> str:
        return ", ".join(f"{name} {self.points[name][-1][1]:.4f}" for name in names)

    def write(self, log: Path | None, png: Path | None) -> None:
        if self.writer:
            self.writer.close()
        if log:
            log.write_text(json.dumps(self.state_dict()))
        if png:
            plot([self.state_dict()], png)

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": self.ranks, **self.points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points = {name: state[name] for name in state if name != "ranks"}


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses of all runs and, below them, their distance from those of the first run."""
    from matplotlib.figure import Figure  # only a plot needs it

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, *below = figure.subplots(len(runs[:2]), sharex=True, squeeze=False)[:, 0]
    for number, run in enumerate(runs):
        ranks = f"{run['ranks']} rank{'s' if run['ranks'] > 1 else ''}"
        for kind, style in zip(LOSSES, ("-", "o"), strict=True):
            look = {"color": f"C{number}", "lw": 4 / (number + 1), "ms": 8 / (number + 1)}
            above.plot(*_columns(run[kind]), style, label=f"{kind}, {ranks}", **look)
            first = dict(runs[0][kind])
            apart = [[step, abs(loss - first[step])] for step, loss in run[kind] if step in first]
            if number:
                below[0].plot(*_columns(apart), style, **look)
    above.set_ylabel("nats per character")
    above.legend()
    for axes in below:
        axes.set_ylabel("distance from the first run")
    [above, *below][-1].set_xlabel("step")
    figure.savefig(path, dpi=160)


def _columns(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    return [row[0] for row in rows], [row[1] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the loss curves of several runs.")
    parser.add_argument("runs", type=Path, nargs="+", help="written by train.py --json")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    args = parser.parse_args()
    plot([json.loads(path.read_text()) for path in args.runs], args.output)


if __name__ == "__main__":
    main()
