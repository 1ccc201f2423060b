# SPDX-License-Identifier: Apache-2.0
"""A text as numbers, the same on all ranks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import torch_ring as hvd


@dataclass(frozen=True)
class Text:
    """A text as indices into `vocabulary`, its different characters in order."""

    characters: Tensor
    vocabulary: str

    @classmethod
    def of(cls, text: str) -> "Text":
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        vocabulary, indices = np.unique(codes, return_inverse=True)
        characters = torch.from_numpy(indices.astype(np.int32))
        return cls(characters, vocabulary.tobytes().decode("utf-32-le"))

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.vocabulary.index(character) for character in text])

    def decode(self, characters: Tensor) -> str:
        return "".join(self.vocabulary[index] for index in characters.tolist())


def load_text(path: Path | None) -> Text:
    """Return the text of a file, or the reference manual of the running Python.

    Rank 0 reads it and broadcasts it: other hosts need no such file, and may have another version
    of Python, with another manual.
    """
    text, problem = None, None
    if hvd.rank() == 0:
        try:
            text = Text.of(path.read_text(encoding="utf-8") if path else python_manual())
        except Exception as error:  # any: the other ranks wait in the broadcast below
            problem = f"cannot read the text {path or 'of pydoc'}: {error}"
    text, problem = hvd.broadcast_object((text, problem), root_rank=0)
    if problem:
        raise SystemExit(problem if hvd.rank() == 0 else 1)  # all ranks leave, one says why
    return text


def python_manual() -> str:
    """Return the texts of ``help("LOOPING")`` and the like: 370,000 characters of plain English."""
    from pydoc_data.topics import topics  # a part of Python, with Python's licence

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    # Topics quote one another: a validation paragraph must not appear in the training part, too.
    return "\n\n".join(dict.fromkeys(paragraphs))


class Windows(Dataset[Tensor]):
    """Windows of `context` + 1 characters: all but the last to read, all but the first to guess.

    They begin `context` characters apart, so the model guesses every character once.
    """

    def __init__(self, characters: Tensor, context: int) -> None:
        self.characters = characters
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.characters) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        start = range(len(self))[index] * self.context  # an IndexError ends `for window in windows`
        return self.characters[start : start + self.context + 1].long()
