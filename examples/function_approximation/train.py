# SPDX-License-Identifier: Apache-2.0
"""Fits y = sin(2 pi x) + sin(4 pi x) on [-1, 1]: one network by all ranks, or an ensemble.

    python train.py                                       # alone, 16 points
    torchrun --nproc-per-node 2 train.py                  # one network, 16 points on each rank
    torchrun --nproc-per-node 4 train.py --ensemble       # four networks, one on each rank
    torchrun --nproc-per-node 4 train.py --members 2      # two networks, each on two ranks
    mpirun -np 4 python train.py --ensemble               # mpirun starts the same

Every rank runs this whole file. The lines with `hvd` make it parallel.
"""

import argparse
import signal
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_ring as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ensemble", action="store_true", help="a network of its own on each rank")
    parser.add_argument("--members", type=int, help="networks; size / members ranks train each")
    parser.add_argument("--points", type=int, default=16, help="of a rank")
    parser.add_argument("--width", type=int, default=16, help="of a hidden layer")
    parser.add_argument("--depth", type=int, default=2, help="hidden layers")
    parser.add_argument("--lr", type=float, default=1e-3, help="for one rank")
    parser.add_argument("--steps", type=int, default=4000, help="in all, also with --resume")
    parser.add_argument("--every", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--checkpoint", type=Path, default=Path("function_approximation.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--plot", type=Path, help="a picture, such as fit.png")
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a test")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.every = 20, 10
    return args


def target(x: Tensor) -> Tensor:
    return torch.sin(2 * torch.pi * x) + torch.sin(4 * torch.pi * x)


def make_model(width: int, depth: int) -> nn.Module:
    sizes = [1] + depth * [width]
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))


def make_team(members: int) -> tuple[int, hvd.ProcessSet]:
    """Return the ensemble member that this rank trains, and the ranks that train it."""
    if members == 1:
        return 0, hvd.global_process_set
    if members < 1 or hvd.size() % members:
        message = f"{hvd.size()} ranks cannot train {members} members"
        sys.exit(message if hvd.rank() == 0 else 1)  # all ranks leave, one says why
    # Every rank adds every set, even those that it is not in: adding a set is a collective of all
    # ranks. If each rank added only its own set, the ranks would disagree.
    each = hvd.size() // members
    teams = [hvd.add_process_set(range(m * each, (m + 1) * each)) for m in range(members)]
    member = hvd.rank() // each
    return member, teams[member]


def load(checkpoint: Path, program: str, team: hvd.ProcessSet) -> dict:
    """Return the team's checkpoint. If one team has none, all ranks end and rank 0 says why."""
    state, problem = None, None
    try:
        state = hvd.checkpoint.load(checkpoint, process_set=team)
        if (other := state.get("program", "another program")) != program:
            raise ValueError(f"{checkpoint} is of {other}, not of {program}")
    except (ValueError, hvd.checkpoint.CheckpointError) as error:
        problem = error
    problems = list(filter(None, hvd.allgather_object(problem and str(problem))))
    if problems:
        sys.exit(f"cannot resume: {problems[0]}" if hvd.rank() == 0 else 1)
    return state


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks at once, and quietly
    args = parse_args()
    hvd.init()
    log = print if hvd.rank() == 0 else lambda *_, **__: None
    torch.set_num_threads(1)  # layers this small are slower on several threads
    torch.set_default_dtype(getattr(torch, args.dtype))
    device = torch.device(args.device)
    if args.device == "cuda":  # one process drives one GPU; members of one rank may share one
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    members = args.members or (hvd.size() if args.ensemble else 1)
    member, team = make_team(members)
    torch.manual_seed(args.seed + member)  # members that start alike would end alike
    model = make_model(args.width, args.depth).to(device)
    # A step averages the gradients of team.size() ranks, so it may be longer.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * team.size())

    # A member has a checkpoint of its own, which the first rank of its team writes and reads.
    checkpoint = args.checkpoint
    if members > 1:
        checkpoint = checkpoint.with_stem(f"{checkpoint.stem}-{member}")
    program = f"examples/function_approximation with {args.depth} layers of {args.width}"
    trained, curve = 0, []
    if args.resume:
        state = load(checkpoint, program, team)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr * team.size()  # the checkpoint has another team's
        trained, curve = state["steps"], state["curve"]

    if team.size() > 1:
        # All ranks of a team start from the weights of its first rank: averaged gradients only
        # keep equal weights equal.
        root = team.ranks[0]
        hvd.broadcast_parameters(model.state_dict(), root, process_set=team)
        hvd.broadcast_optimizer_state(optimizer, root, process_set=team)
        # Without process_set, all ranks would average together and train one network.
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), process_set=team
        )

    # Each rank has its own stretch of the interval, and equally many points: only then is the
    # average over the ranks the average over all points.
    points = torch.linspace(-1, 1, args.points * team.size(), device=device)
    x = points.view(team.size(), args.points, 1)[team.rank()]
    y = target(x)

    log(f"members: {members}, ranks of each: {team.size()}, points of a rank: {args.points}")
    writer = None
    if args.tensorboard and team.rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard / f"member-{member}")
    mean_loss = hvd.metrics.Mean(process_set=team)
    for step in range(trained + 1, args.steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # when it returns, the gradients are averages over the team
        optimizer.step()
        mean_loss.update(loss)
        if step % args.every == 0 or step == args.steps:
            # compute() and save() are collectives: all ranks of the team call them, one prints.
            curve.append((step, mean_loss.compute()))
            mean_loss.reset()
            log(f"step {step}: loss {curve[-1][1]:.3e}", flush=True)
            if writer:
                writer.add_scalar("loss", curve[-1][1], step)
            state = {"program": program, "steps": step, "curve": curve}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            hvd.checkpoint.save(checkpoint, state, process_set=team)
    if writer:
        writer.close()

    grid = torch.linspace(-1, 1, 401, device=device)[:, None]
    with torch.no_grad():
        prediction = model(grid).T.cpu()
    # All ranks gather: under `if rank == 0`, rank 0 would wait for the others. The ranks of a team
    # have the same network, so one prediction of each team is enough.
    predictions = hvd.allgather(prediction)[:: team.size()]
    curves = hvd.allgather_object(curve)[:: team.size()]
    if hvd.rank() == 0:
        report(predictions, target(grid).T.cpu())
        if args.plot:
            plot(args.plot, grid.flatten().cpu(), predictions, points.cpu(), curves, args.points)


def report(predictions: Tensor, exact: Tensor) -> None:
    """Print relative L2 errors: of each member and, if there are several, of their mean."""
    errors = (predictions - exact).norm(dim=1) / exact.norm()
    print("relative L2 error:", ", ".join(f"{error:.4f}" for error in errors))
    if len(predictions) > 1:
        mean, band = predictions.mean(0), 2 * predictions.std(0)
        inside = ((mean - exact[0]).abs() <= band).double().mean()
        error = (mean - exact[0]).norm() / exact.norm()
        print(
            f"mean of the members: {error:.4f}; 2 sigma around it have {inside:.0%} of the target"
        )


def plot(
    path: Path, x: Tensor, predictions: Tensor, points: Tensor, curves: list, of_rank: int
) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, no window: the machine may have no display
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained"
    )
    mean = predictions.mean(0)
    if len(predictions) > 1:
        band = 2 * predictions.std(0)
        left.fill_between(x, mean - band, mean + band, alpha=0.25, label="2 sigma")
        left.plot(x, predictions.T, linewidth=0.5, alpha=0.6)
    left.plot(x, mean, "C0", label="mean" if len(predictions) > 1 else "network")
    left.plot(x, target(x), "k:", label="target")
    for rank, own in enumerate(points.split(of_rank)):
        label = f"points of rank {rank}" if len(points) > of_rank else "points of each"
        left.plot(own, target(own), f"C{rank + 1}o", markersize=4, label=label)
    left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    left.legend(fontsize="small", ncols=3, loc="lower center")
    for curve in curves:
        right.semilogy(*zip(*curve, strict=True))
    right.set(xlabel="step", ylabel="loss")
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
