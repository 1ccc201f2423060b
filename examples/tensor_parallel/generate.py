# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel inference: each rank has a part of every layer of a small transformer."""

import argparse
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

import torch_ring as hvd


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", choices=["hvd", "ring", "gloo"], default="hvd")
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args()


class Split(nn.Module):
    """A linear layer of which this rank has a part.

    By columns: this rank computes a part of the outputs, of all inputs. By rows: it adds its part
    of the inputs to all outputs, which the ranks must sum.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, size: int, *, by_columns: bool):
        super().__init__()
        whole = nn.Linear(inputs, outputs, bias=False).weight.detach()  # alike on all ranks
        self.register_buffer("weight", whole.chunk(size, 0 if by_columns else 1)[rank].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Block(nn.Module):
    """One layer: this rank has some heads of the attention, and some units of the MLP.

    Each half begins by columns and ends by rows, so it takes one allreduce.
    """

    def __init__(self, width: int, heads: int, context: int, rank: int, size: int, total) -> None:
        super().__init__()
        self.total = total  # sums a tensor over the ranks
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        columns, rows = (
            lambda out: Split(width, out, rank, size, by_columns=True),
            lambda inp: Split(inp, width, rank, size, by_columns=False),
        )
        self.query, self.key, self.value = columns(width), columns(width), columns(width)
        self.output = rows(width)
        self.up, self.down = columns(4 * width), rows(4 * width)
        self.shape = (1, heads // size, width // heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads // size, context, width // heads))

    def forward(self, x: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        """Return the layer's result for one token, shape [1, width], at `place` in the text."""
        normed = self.norms[0](x)
        self.keys.index_copy_(2, place, self.key(normed).view(self.shape).unsqueeze(2))
        self.values.index_copy_(2, place, self.value(normed).view(self.shape).unsqueeze(2))
        query = self.query(normed).view(self.shape).unsqueeze(2)
        mixed = scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + self.total(self.output(mixed.flatten(1)))
        return x + self.total(self.down(gelu(self.up(self.norms[1](x)))))


class Transformer(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, context: int, rank, size, total):
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, context, rank, size, total) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, token: Tensor, place: Tensor) -> Tensor:
        """Return the most probable token after `token`, which is at `place`; both of shape [1]."""
        seen = (torch.arange(self.context) <= place).view(1, 1, 1, -1)
        x = self.tokens(token) + self.places(place)
        for block in self.blocks:
            x = block(x, place, seen)
        return self.head(self.norm(x)).argmax(-1)


@torch.inference_mode()
def generate(model, count: int) -> list[int]:
    """Return `count` tokens."""
    token, found = torch.tensor([0]), []
    for place in range(count):
        token = model(token, torch.tensor([place]))
        found.append(int(token))
    return found


def sum_over(door: str):
    """Return the function that sums a tensor over the ranks, and this process's rank and size."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once
    if door == "hvd":
        hvd.init()
        return lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.rank(), hvd.size()

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    dist.init_process_group(door)
    return total, dist.get_rank(), dist.get_world_size()


def main() -> None:
    args = options()
    total, rank, size = sum_over(args.over)
    torch.manual_seed(0)  # all ranks cut their parts out of the same weights
    model = Transformer(args.layers, args.heads, args.width, args.tokens, rank, size, total)
    model = model.to(getattr(torch, args.dtype)).eval()
    step = model if args.eager else torch.compile(model, fullgraph=True)
    generate(step, 2)  # compiles
    begin = time.perf_counter()
    found = generate(step, args.tokens)
    rate = args.tokens / (time.perf_counter() - begin)
    if rank == 0:
        print(f"{args.over}, {size} ranks: {rate:.0f} tokens a second; they begin {found[:8]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
