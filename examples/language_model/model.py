# SPDX-License-Identifier: Apache-2.0
"""A GPT: a decoder-only transformer with pre-norm blocks (Radford et al. 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Causal self-attention: a position sees itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads")
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three times (batch, heads, length, width / heads)
        joint = self.queries_keys_values(x).view(batch, length, 3, self.heads, -1)
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention mixes positions, then an MLP works on each alone; both add to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next character of a text from at most `context` characters before it.

    It has no dropout: the passes over the text are few, and without dropout a step is the same on
    any number of ranks.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialize)
        # Each block adds twice to the residual stream, whose variance must not grow with depth.
        for block in self.blocks:
            for last in (block.attention.output, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.characters.weight  # tied: one matrix reads and writes characters

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for characters (batch, length)."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """Return the characters of `prompt` (length,) and `count` drawn ones after them."""
        generator = torch.Generator(prompt.device).manual_seed(0)
        text = prompt
        for _ in range(count):
            logits = self(text[None, -self.context :])[0, -1]
            chances = torch.softmax(logits.float() / temperature, dim=0)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)])
        return text


def _initialize(module: nn.Module) -> None:
    """Draw weights as GPT-2 does; tied weights of this size make the first guess a uniform one."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
