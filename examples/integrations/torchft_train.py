# SPDX-License-Identifier: Apache-2.0
"""torchft on ring: a replica dies and comes back, and the other one goes on meanwhile.

torchft's manager decides at each step which replicas take part. The group of torch.distributed,
made with enable_reconfigure, forms anew among them: torch 2.14 and torchft-nightly can do that.
"""

import argparse
import hashlib
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

import torch_ring  # noqa: F401 - makes the backend known; an installed torch_ring does not need it

TOGETHER = 40  # steps of both replicas, before and after the death
TIMEOUT = timedelta(seconds=60)


def train(replica: int, lighthouse: str) -> None:
    torch.manual_seed(replica)  # the first step brings all replicas the weights of one
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    together = 0

    def state_dict():
        return {"model": model.state_dict(), "adam": adam.state_dict(), "together": together}

    def load_state_dict(state):
        nonlocal together
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        together = state["together"]

    # A group without ranks; the manager gives it those of the quorum.
    dist.init_process_group(
        "ring", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=dist.group.WORLD,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    data = torch.Generator().manual_seed(1 + replica)
    losses = []
    try:
        while together < TOGETHER:
            step = manager.current_step()
            inputs = torch.randn(32, 16, generator=data)
            optimizer.zero_grad()  # begins the quorum
            loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()  # of all replicas, or of none
            losses.append(loss.item())
            if manager.current_step() > step and manager.num_participants() == 2:
                together += 1
            print(f"{manager.num_participants()} replicas, {together} steps together", flush=True)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(
            f"rank {replica} of {manager.num_participants()} on {dist.get_backend()}: "
            f"loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}",
            flush=True,
        )
    finally:
        manager.shutdown(wait=False)
        dist.destroy_process_group()


def start(replica: int, lighthouse: str) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, str(replica), lighthouse]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def wait_for(program: subprocess.Popen[str], line: str) -> None:
    while (text := program.stdout.readline()) != line + "\n":
        assert text, f"the replica has ended before it said {line!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replica", type=int, nargs="?")
    parser.add_argument("lighthouse", nargs="?")
    args = parser.parse_args()
    if args.replica is not None:
        train(args.replica, args.lighthouse)
        return
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    programs = [start(replica, server.address()) for replica in range(2)]
    try:
        wait_for(programs[1], f"2 replicas, {TOGETHER // 4} steps together")
        programs[1].kill()
        programs[1].communicate()
        print("replica 1 has died", flush=True)
        while not programs[0].stdout.readline().startswith("1 replicas"):
            assert programs[0].poll() is None
        print("replica 0 goes on alone", flush=True)
        programs[1] = start(1, server.address())
        for program in programs:
            output, _ = program.communicate()
            print(output.splitlines()[-1], flush=True)
            assert program.returncode == 0
    finally:
        for program in programs:
            program.kill()
        server.shutdown()


if __name__ == "__main__":
    main()
