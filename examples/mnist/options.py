# SPDX-License-Identifier: Apache-2.0
"""The options of train.py."""

import argparse
import sys
from pathlib import Path

import torch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    add = parser.add_argument
    add("--dataset", choices=["mnist", "digits"], default="mnist")
    add("--data-dir", type=Path, default=Path("data"), help="where MNIST is, or is put")
    add("--epochs", type=count, help="in all, also with --resume; 1 of mnist, 10 of digits")
    add("--batch-size", type=count, help="images of a rank in a step; 64 of mnist, 16 of digits")
    add("--lr", type=float, default=0.001, help="right for one rank")
    add("--warmup-epochs", type=float, default=0.5, help="in which the rate rises to size x lr")
    add("--checkpoint", type=Path, default=Path("mnist.pt"))
    add("--resume", action="store_true", help="go on from the checkpoint")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=default)
    add("--smoke", action="store_true", help="other defaults, for a try in seconds")
    if "--smoke" in sys.argv:
        parser.set_defaults(dataset="digits", epochs=1)
    return parser.parse_args()


def count(text: str) -> int:
    """Return a number of epochs or images."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)
