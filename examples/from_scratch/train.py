# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training from scratch: a hook, a fusion buffer, a ring allreduce, an optimizer."""

import functools

import torch
import torch.distributed as dist


def ring_allreduce(buffer):
    """Sum a buffer over all ranks, in place: each sends to the next one, 2 (size - 1) times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(size)

    def pass_on(sent, received):
        sending = dist.isend(chunks[sent % size], (rank + 1) % size)
        incoming = torch.empty_like(chunks[received % size])
        dist.recv(incoming, (rank - 1) % size)
        sending.wait()
        return chunks[received % size], incoming

    for step in range(size - 1):  # reduce-scatter: at its end each rank has the sum of one chunk
        chunk, incoming = pass_on(rank - step, rank - step - 1)
        chunk += incoming
    for step in range(size - 1):  # allgather: the sums go around the ring
        chunk, incoming = pass_on(rank + 1 - step, rank - step)
        chunk.copy_(incoming)


class DistributedOptimizer:
    """Averages the gradients of an optimizer's parameters before backward() returns."""

    def __init__(self, optimizer):
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.count = self.missing = len(parameters)
        self.buffer = torch.zeros(sum(p.numel() for p in parameters))  # the fusion buffer
        begin = 0
        for p in parameters:
            place = self.buffer[begin : begin + p.numel()].view_as(p)
            p.register_post_accumulate_grad_hook(functools.partial(self.arrived, place))
            begin += p.numel()

    def arrived(self, place, parameter):
        """Autograd has computed a gradient: put it into its place in the buffer."""
        place.copy_(parameter.grad)
        parameter.grad = place
        self.missing -= 1
        if self.missing == 0:  # the buffer is full
            ring_allreduce(self.buffer)
            self.buffer /= dist.get_world_size()
            self.missing = self.count


def train(wrap, rank, size):
    """Train a small network on this rank's share of the samples; return it and the last loss."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.2))
    inputs = 2 * torch.rand(600, 2) - 1
    targets = inputs.prod(1, keepdim=True)
    for _ in range(1000):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[rank::size]), targets[rank::size])
        loss.backward()
        optimizer.step()
    return model, loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, loss = train(DistributedOptimizer, dist.get_rank(), dist.get_world_size())
    print(f"rank {dist.get_rank()}: loss {loss:.6f}, bias {model[2].bias.item():.6f}")
    dist.destroy_process_group()
