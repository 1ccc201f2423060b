# SPDX-License-Identifier: Apache-2.0
"""Makes a small folder of JPEGs in ImageNet's layout, to try train.py without ImageNet.

    python make_images.py images --classes 10 --train 100 --val 20

A class is a direction and a colour of stripes, under noise: images/train/stripes_03/0017.jpg.
"""

import argparse
import colorsys
from pathlib import Path

import numpy as np
from PIL import Image


def stripes(label: int, classes: int, rng: np.random.Generator) -> Image.Image:
    """Return a picture of a class: 80 to 160 pixels wide and high, as photos differ in size."""
    width, height = rng.integers(80, 161, 2)
    y, x = np.mgrid[:height, :width]
    # From horizontal to vertical: beyond, a class would be the mirror image of another.
    angle = np.pi / 2 * label / classes + rng.normal(0, 0.05)
    across = x * np.cos(angle) + y * np.sin(angle)
    wave = np.sin(2 * np.pi * (across / rng.uniform(12, 24) + rng.random()))
    # Every third class has the same colour: neither colour nor direction is enough alone.
    colour = np.array(colorsys.hsv_to_rgb(label % 3 / 3, 0.6, 1.0))
    picture = (0.5 + 0.3 * wave)[..., None] * colour + rng.normal(0, 0.1, (height, width, 3))
    return Image.fromarray((255 * picture.clip(0, 1)).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--train", type=int, default=100, help="images of a class to train on")
    parser.add_argument("--val", type=int, default=20, help="images of a class to test on")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for part, count in {"train": args.train, "val": args.val}.items():
        for label in range(args.classes):
            folder = args.folder / part / f"stripes_{label:02}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                stripes(label, args.classes, rng).save(folder / f"{number:04}.jpg", quality=90)


if __name__ == "__main__":
    main()
