# SPDX-License-Identifier: Apache-2.0
"""Solves -u'' = f on [-1, 1], u(-1) = u(1) = 0, with a physics-informed network, on many ranks.

    python train.py                                       # alone, 51 collocation points
    torchrun --nproc-per-node 2 train.py                  # one network, 51 points on each rank
    torchrun --nproc-per-node 4 train.py --ensemble       # four equations, one on each rank
    mpirun -np 2 python train.py                          # mpirun starts the same

f = (k pi)^2 sin(k pi x), so that the exact solution is u = sin(k pi x): k = 2, or rank + 1 in an
ensemble. Every rank runs this whole file. The lines with `hvd` make it parallel.
"""

import argparse
import signal
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_ring as hvd

BOUNDARY = (-1.0, 1.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ensemble", action="store_true", help="rank r solves for k = r + 1")
    parser.add_argument("--points", type=int, help="of a rank; 51, or 101 in an ensemble")
    parser.add_argument("--width", type=int, default=32, help="of a hidden layer")
    parser.add_argument("--depth", type=int, default=2, help="hidden layers")
    parser.add_argument("--boundary-weight", type=float, default=1.0, help="of its loss")
    parser.add_argument("--iterations", type=int, help="in all; 800, or 2400 in an ensemble")
    parser.add_argument("--every", type=int, default=40, help="iterations between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("pinn.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--plot", type=Path, help="a picture, such as solution.png")
    parser.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--smoke", action="store_true", help="a few iterations, as a test")
    args = parser.parse_args()
    args.points = args.points or (101 if args.ensemble else 51)
    args.iterations = args.iterations or (2400 if args.ensemble else 800)
    if args.smoke:
        args.iterations, args.every = 10, 5
    return args


def make_model(width: int, depth: int, k: int) -> nn.Module:
    sizes = [1] + depth * [width]
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    # Networks learn slow functions first. Hidden units that start k times steeper vary over a
    # half-wave of f, for every k.
    with torch.no_grad():
        hidden[0].weight.mul_(k)
        hidden[0].bias.mul_(k)
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))


def exact(x: Tensor, k: int) -> Tensor:
    return torch.sin(k * torch.pi * x)


def residual_loss(model: nn.Module, x: Tensor, k: int) -> Tensor:
    """Return the mean square of u'' + f at `x`, in units of the largest f."""
    x = x.requires_grad_()
    u = model(x)
    # create_graph: the results are differentiated again, by x and then by the weights. These two
    # calls leave the gradients of the weights alone, so torch_ring averages nothing in them.
    (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    largest = (k * torch.pi) ** 2  # otherwise, f of a large k would outweigh the boundary
    return (u_xx / largest + exact(x, k)).square().mean()


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
    torch.set_default_dtype(torch.float64)  # the line search of L-BFGS compares close losses
    device = torch.device(args.device)
    if args.device == "cuda":  # one process drives one GPU; members of an ensemble may share one
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    # `team`: the ranks that train one network; in an ensemble each rank alone, with its own
    # checkpoint. Every rank adds every set: adding a set is a collective of all ranks.
    team, k, checkpoint = hvd.global_process_set, 2, args.checkpoint
    if args.ensemble:
        if hvd.size() > 1:
            team = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
        k = hvd.rank() + 1
        checkpoint = checkpoint.with_stem(f"{checkpoint.stem}-{k}")

    torch.manual_seed(args.seed)
    model = make_model(args.width, args.depth, k).to(device)
    # L-BFGS follows the curvature of the loss. Adam needs thousands of steps and still leaves slow
    # errors, which u'' hardly shows. Tolerances of zero: every call takes max_iter iterations.
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )
    program = f"examples/pinn with k = {k} and {args.depth} layers of {args.width}"
    done, curves = 0, {"residual": [], "boundary": []}
    if args.resume:
        state = load(checkpoint, program, team)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, curves = state["iterations"], state["curves"]
    if not args.ensemble:
        # All ranks start from rank 0's weights and average their gradients. In an ensemble they do
        # neither: each rank has a network of its own.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # Each rank of a team has its own stretch of the interval. All ranks have both ends, and the
    # average of their equal boundary losses is that loss.
    points = torch.linspace(*BOUNDARY, args.points * team.size(), device=device)
    x = points.view(team.size(), args.points, 1)[team.rank()]
    ends = torch.tensor(BOUNDARY, device=device)[:, None]

    def losses() -> tuple[Tensor, Tensor]:
        return residual_loss(model, x, k), model(ends).square().mean()

    def closure() -> Tensor:
        optimizer.zero_grad()
        residual, boundary = losses()
        loss = residual + args.boundary_weight * boundary
        loss.backward()
        # L-BFGS gets loss and gradients averaged over the ranks, so the line searches of all ranks
        # try the same steps. A rank that tried one step more would wait in it for the others.
        return loss

    log(f"size {hvd.size()}, {args.points} points a rank, {len(points)} for one network")
    writer = None
    if args.tensorboard and team.rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard / f"k-{k}")
    means = hvd.metrics.Means("residual", "boundary", process_set=team)
    (group,) = optimizer.param_groups
    while done < args.iterations:
        count = min(args.every, args.iterations - done)
        group.update(max_iter=count, max_eval=10 * count)  # the checkpoint has those of its run
        optimizer.step(closure)  # `count` iterations
        done += count
        residual, boundary = losses()
        means.update(len(x), residual=residual, boundary=boundary)
        # compute() and save() are collectives: all ranks of the team call them, one prints.
        values = means.compute()
        means.reset()
        for name, value in values.items():
            curves[name].append((done, value))
            if writer:
                writer.add_scalar(f"loss/{name}", value, done)
        log(f"iteration {done}:", ", ".join(f"{n} {v:.2e}" for n, v in values.items()), flush=True)
        state = {"program": program, "iterations": done, "curves": curves}
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        hvd.checkpoint.save(checkpoint, state, process_set=team)
    if writer:
        writer.close()

    grid = torch.linspace(*BOUNDARY, 401, device=device)[:, None]
    with torch.no_grad():
        solution = model(grid).T.cpu()
    # All ranks gather: under `if rank == 0`, rank 0 would wait for the others. The ranks of a team
    # have the same network, so one solution of each team is enough.
    solutions = hvd.allgather(solution)[:: team.size()]
    all_curves = hvd.allgather_object(curves)[:: team.size()]
    if hvd.rank() == 0:
        grid = grid.flatten().cpu()
        waves = range(1, hvd.size() + 1) if args.ensemble else [k]
        for wave, u in zip(waves, solutions, strict=True):
            error = (u - exact(grid, wave)).norm() / exact(grid, wave).norm()
            print(f"k = {wave}: relative L2 error {error:.1e}")
        if args.plot:
            plot(args.plot, grid, dict(zip(waves, solutions, strict=True)), all_curves)


def plot(path: Path, x: Tensor, solutions: dict[int, Tensor], all_curves: list) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, no window: the machine may have no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2,
        len(solutions),
        figsize=(max(5, 2.6 * len(solutions)), 4.4),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for (k, u), curves, (above, below) in zip(solutions.items(), all_curves, axes.T, strict=True):
        above.plot(x, u, label="network")
        above.plot(x, exact(x, k), "k:", label="exact")
        above.set(title=f"k = {k}", xlabel="x")
        for name, curve in curves.items():
            below.semilogy(*zip(*curve, strict=True), label=name)
        below.set(xlabel="iteration")
    axes[0, 0].set(ylabel="u")
    axes[1, 0].set(ylabel="loss")
    axes[0, 0].legend(fontsize="small")
    axes[1, 0].legend(fontsize="small")
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
