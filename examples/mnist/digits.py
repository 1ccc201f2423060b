# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits to train on: MNIST or, without a network, the ones in scikit-learn."""

import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import torch_ring as hvd


@dataclass(frozen=True)
class Digits:
    """Images of shape [1, pixels, pixels] from 0 to 1, their labels, and how long to train."""

    name: str
    train: TensorDataset
    test: TensorDataset
    pixels: int
    epochs: int
    batch_size: int


def load_data(dataset: str, folder: Path) -> Digits:
    """Return the digits: "mnist", with the files in `folder`, or "digits" of scikit-learn.

    Collective: all ranks call it, and all get the same digits.
    """
    if dataset == "mnist" and download_mnist(folder):
        return load_mnist(folder)
    return load_scikit_learn()


def download_mnist(folder: Path) -> bool:
    """Download MNIST on each host; return whether all hosts have it, the same on all ranks."""
    problem = None
    try:
        from torchvision.datasets import MNIST

        if hvd.local_rank() == 0:  # one rank of a host: several would write the same files
            socket.setdefaulttimeout(10)  # torchvision would wait for a silent server for minutes
            MNIST(folder, download=True)
    except (ImportError, OSError, RuntimeError) as error:
        problem = " ".join(str(error).split())
    finally:
        socket.setdefaulttimeout(None)
    # The other ranks wait here for the files. A rank that failed must come here, too: if it left,
    # the others would wait in vain. All ranks get the same problems, so all load the same digits:
    # ranks with different numbers of steps would wait for each other's missing ones.
    problems = [text for text in hvd.allgather_object(problem) if text]
    if problems and hvd.rank() == 0:
        print(f"MNIST cannot be had, so scikit-learn's digits: {problems[0]}", flush=True)
    return not problems


def load_mnist(folder: Path) -> Digits:
    """Return 60000 images to train on and 10000 to test on."""
    from torchvision.datasets import MNIST

    train, test = (
        TensorDataset(images.data[:, None] / 255, images.targets)
        for images in (MNIST(folder, train=True), MNIST(folder, train=False))
    )
    return Digits("mnist", train, test, pixels=28, epochs=1, batch_size=64)


def load_scikit_learn() -> Digits:
    """Return 1437 images to train on and 360 to test on; scikit-learn brings them along."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    # The same seed on all ranks: otherwise a rank would test on training samples of another.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (
        TensorDataset(images[part], labels[part]) for part in (order[:1437], order[1437:])
    )
    return Digits("digits", train, test, pixels=8, epochs=10, batch_size=16)
