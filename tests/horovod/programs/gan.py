# SPDX-License-Identifier: Apache-2.0
"""Two optimizers, clipping and scaling in Horovod's way, uneven data, sparse rows, objects."""

import torch
from torch import nn, optim

import torch_ring as hvd


def gan():
    torch.manual_seed(1 + hvd.rank())
    generator, critic = nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    pairs = []
    for net in (generator, critic):
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        adam = optim.Adam(net.parameters(), lr=0.01)
        hvd.broadcast_optimizer_state(adam, root_rank=0)
        pairs.append(hvd.DistributedOptimizer(adam, named_parameters=net.named_parameters()))
    step_generator, step_critic = pairs
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(5):
        step_critic.zero_grad()
        fake = generator(torch.randn(8, 2)).detach()
        loss = critic(fake).mean() - critic(torch.randn(8, 1) + 3).mean()
        scaler.scale(loss).backward()
        step_critic.synchronize()
        scaler.unscale_(step_critic)
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        with step_critic.skip_synchronize():
            scaler.step(step_critic)
        scaler.update()

        step_generator.zero_grad()
        (-critic(generator(torch.randn(8, 2))).mean()).backward()
        step_generator.synchronize()
        torch.nn.utils.clip_grad_norm_(generator.parameters(), 1.0)
        with step_generator.skip_synchronize():
            step_generator.step()
    for net in (generator, critic):
        for parameter in net.parameters():
            values = parameter.detach()
            assert all(torch.equal(values, other) for other in hvd.allgather_object(values))


def uneven_and_sparse():
    embedding = nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(embedding.parameters(), lr=0.1), named_parameters=embedding.named_parameters()
    )
    for step in range(3 + hvd.rank()):
        optimizer.zero_grad()
        embedding(torch.tensor([step, hvd.rank()])).sum().backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=hvd.size() - 1)
    vocabulary = hvd.broadcast_object({"a": 1} if hvd.rank() == 0 else None, root_rank=0)
    assert vocabulary == {"a": 1}


class HalfCompressor(hvd.Compression.none):
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def by_hand():
    tensors = {f"layer.{i}": torch.full((100,), float(i)) for i in range(6)}
    names = list(tensors) if hvd.rank() % 2 == 0 else list(reversed(tensors))
    handles = [(n, hvd.allreduce_async_(tensors[n], name=n, op=hvd.Sum)) for n in names]
    for name, handle in handles:
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is tensors[name]
        assert tensors[name][0] == float(name[-1]) * hvd.size()
    reduced = hvd.allreduce(torch.ones(3), compression=HalfCompressor, op=hvd.Sum)
    assert reduced.dtype == torch.float32
    assert reduced[0] == hvd.size()


def main():
    hvd.init()
    torch.set_num_threads(1)
    gan()
    uneven_and_sparse()
    by_hand()
    try:
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong")
        assert hvd.size() == 1
    except hvd.HorovodInternalError:
        hvd.shutdown()
        hvd.init()
    hvd.allreduce(torch.ones(1), name="right")


if __name__ == "__main__":
    main()
