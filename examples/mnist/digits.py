"""Handwritten digits to train on: MNIST, or what stands in for it without a network."""

import socket
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import torch_ring as hvd


def load_mnist(data_dir: Path) -> tuple[TensorDataset, TensorDataset] | None:
    """Return what to train on and what to test on, or None if MNIST cannot be had.

    28 x 28 pixels; 60000 and 10000 images. Collective: all ranks call it and get the same answer.
    """
    problem = None
    try:
        from torchvision.datasets import MNIST

        if hvd.local_rank() == 0:  # one process of a host: several would write the same files
            socket.setdefaulttimeout(10)  # torchvision would wait for a silent server for minutes
            MNIST(data_dir, download=True)
    except (ImportError, OSError, RuntimeError) as error:
        problem = " ".join(str(error).split())
    finally:
        socket.setdefaulttimeout(None)
    # Here the other ranks wait for the files. A rank that failed must come here too and say so:
    # if it left instead, the others would wait in vain. And as all hear the same, all decide the
    # same: ranks that train on different data would wait for each other's missing steps.
    problems = [text for text in hvd.allgather_object(problem) if text]
    if problems:
        if hvd.rank() == 0:
            print(f"MNIST cannot be had, so scikit-learn's digits: {problems[0]}", flush=True)
        return None
    train, test = MNIST(data_dir, train=True), MNIST(data_dir, train=False)
    return (
        TensorDataset(train.data[:, None] / 255, train.targets),
        TensorDataset(test.data[:, None] / 255, test.targets),
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return what to train on and what to test on, of the digits that scikit-learn brings along.

    8 x 8 pixels; 1437 and 360 images.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    # Seeded alike on all ranks, or one would test on what another was trained on.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
