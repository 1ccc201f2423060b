# SPDX-License-Identifier: Apache-2.0
"""Jobs of a real Slurm, with its daemons on this machine: the commands of docs/launching.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from scripts import ROOT
from slurm import DEADLINE_S, Slurm

PAGE = (ROOT / "docs" / "launching.md").read_text()
(COMMAND,) = re.findall(r"^\| Slurm \| `(srun [^`]*)` \|", PAGE, re.MULTILINE)
HELLO = str(Path(__file__).parent / "hello.py")

pytestmark = [pytest.mark.launcher, pytest.mark.netns, pytest.mark.slow]

PLACES = """
import json, os
import torch
import torch_ring as hvd
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
place = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print("place", json.dumps([*place, os.environ["SLURMD_NODENAME"]]))
"""


def places(cluster: Slurm, command: str, **variables: str) -> list[list[object]]:
    """Return rank, local rank and size, cross rank and size and node of each rank of a step."""
    (cluster.folder / "train.py").write_text(PLACES)
    ended = cluster.run(*shlex.split(command), **variables)
    assert ended.code == 0, ended.output
    return sorted(
        json.loads(line) for line in re.findall(r"^place (.*)", ended.output, re.MULTILINE)
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # The test has 2 ranks on a node in place of 8.
        (
            COMMAND.replace("--ntasks-per-node 8", "--ntasks-per-node 2"),
            [[0, 0, 2, 0, 2, 0], [1, 1, 2, 0, 2, 0], [2, 0, 2, 1, 2, 1], [3, 1, 2, 1, 2, 1]],
        ),
        (
            "srun -N2 -n3 --distribution=cyclic python train.py",
            [[0, 0, 2, 0, 2, 0], [1, 0, 1, 1, 2, 1], [2, 1, 2, 0, 1, 0]],
        ),
        # Rank 0 is not on the first node.
        (
            "srun -n3 --distribution=arbitrary python train.py",
            [[0, 0, 1, 0, 2, 1], [1, 0, 2, 1, 2, 0], [2, 1, 2, 0, 1, 0]],
        ),
    ],
    ids=["of the page", "in turn", "by a file"],
)
def test_places_of_ranks(slurm, command, expected):
    first, second = slurm.nodes
    (slurm.folder / "order").write_text(f"{second}\n{first}\n{first}\n")
    variables = {"SLURM_HOSTFILE": "order"} if "arbitrary" in command else {}
    assert places(slurm, command, **variables) == [
        [*place, slurm.nodes[node]] for *place, node in expected
    ]


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_heterogeneous_jobs(slurm, order):
    """If reversed, the list of a step's nodes is not in the order of their numbers."""
    one, two = slurm.nodes[::order]
    command = f"srun -w {one} -n1 python train.py : -w {two} -n2 python train.py"
    assert sorted(place[:3] + place[5:] for place in places(slurm, command)) == [
        [0, 0, 1, one],
        [1, 0, 2, two],
        [2, 1, 2, two],
    ]


def test_two_steps_of_a_job_at_once(slurm):
    """The second one begins when the ranks of the first are one world, and ends before it does."""
    (slurm.folder / "first.py").write_text(
        f"{PLACES}\nimport pathlib, time\n"
        "hvd.barrier()\n"
        "pathlib.Path('met').touch()\n"
        "while not pathlib.Path('second').exists(): time.sleep(0.05)\n"
        "print('still', hvd.allreduce(torch.ones(1), op=hvd.Sum).item())\n"
    )
    job = slurm.submit(
        "srun --overlap python first.py & first=$!\n"
        "until test -e met || ! kill -0 $first; do sleep 0.05; done\n"
        f"srun --overlap python {HELLO}; second=$?\n"
        "touch second\n"
        "wait $first && exit $second\n",
        *("-N2", "-n2"),
    )
    state, output = slurm.wait_for_end(job), slurm.output_of(job)
    assert state == "COMPLETED 0:0", output
    assert output.index("rank 1 of 2: torch") < output.index("still 2.0")
    assert output.count("still 2.0") == 2


def test_a_task_that_is_killed_ends_the_job(slurm):
    (slurm.folder / "killed.py").write_text(
        "import os, signal\nimport torch\nimport torch_ring as hvd\n"
        "hvd.init()\nhvd.barrier()\n"
        "if hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n    hvd.allreduce(torch.ones(1), name='loss')\n"
        "except hvd.PeerLostError as error:\n    print('told', hvd.rank(), error)\n    raise\n"
    )
    job = slurm.submit("srun python killed.py\n", "-N2", "-n3")
    state, output = slurm.wait_for_end(job), slurm.output_of(job)
    assert state.startswith("FAILED"), output
    for rank in (0, 2):
        assert re.search(f"^told {rank} .*rank 1", output, re.MULTILINE), output


def test_a_job_whose_time_ends_is_run_again(slurm):
    """As in docs/clusters.md, with 2 ranks in place of 4: a signal a minute before the limit.

    The first run trains until it is stopped, and the second one goes on from there to the end. The
    limit is a minute from when the ranks are up until they have stopped, and far away otherwise.
    """
    (slurm.folder / "train.py").write_text(
        "import os, pathlib, sys, time\nimport torch\nimport torch_ring as hvd\n"
        "hvd.init()\nhvd.preemption.watch()\n"
        "saved = pathlib.Path('saved')\n"
        "run = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "step = int(saved.read_text()) if saved.exists() else 0\n"
        "print('run', run, 'begins at', step, flush=True)\n"
        "hvd.barrier()\n"
        "while run == '0':\n"
        "    step += 1\n"
        "    assert hvd.allreduce(torch.tensor(step)).item() == step\n"
        "    if hvd.preemption.requested():\n"
        "        print('stops at', step, hvd.preemption.reason(), flush=True)\n"
        "        if hvd.rank() == 0: saved.write_text(str(step))\n"
        "        hvd.barrier()\n"
        "        while not pathlib.Path('prolonged').exists(): time.sleep(0.05)\n"
        "        sys.exit(143)\n"
        "print('ended', flush=True)\n"
    )
    page = (ROOT / "docs" / "clusters.md").read_text()
    script = re.findall(r"^(#SBATCH --signal.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    assert "-np 4 " in script
    options = ["--time=60", "--nodes=1", "--ntasks=2", "--open-mode=append"]
    job = slurm.submit(script.replace("-np 4 ", "-np 2 "), *options)
    slurm.wait_for(lambda: slurm.output_of(job).count("run 0 begins") == 2, "both ranks are up")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    slurm.wait_for(lambda: slurm.output_of(job).count("stops at") == 2, "both ranks stop")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    (slurm.folder / "prolonged").touch()
    state, output = slurm.wait_for_end(job, deadline_s=4 * DEADLINE_S), slurm.output_of(job)
    assert state == "COMPLETED 0:0", output
    steps = re.findall(r"stops at (\d+) rank \d .*SIGUSR1", output)
    assert len(steps) == 2, output
    assert steps[0] == steps[1], output
    assert output.count("run 0 begins at 0") == 2, output
    assert output.count(f"run 1 begins at {steps[0]}") == 2, output
    assert output.count("stdout>:ended") == 2, output


def test_the_script_of_the_elastic_example(slurm):
    """The test has 2 ranks on a node in place of 4."""
    example = ROOT / "examples" / "elastic"
    options = ["-o", f"{slurm.folder}/job-%j.out", "-D", str(example), "--ntasks-per-node", "2"]
    ended = slurm.run("sbatch", "--parsable", *options, str(example / "slurm.sbatch"))
    assert ended.code == 0, ended.output
    job = ended.output.strip()
    state, output = slurm.wait_for_end(job), slurm.output_of(job)
    assert state == "COMPLETED 0:0", output
    assert "4 ranks" in output
    assert "accuracy" in output


def test_ranks_that_srun_starts_for_mpi(slurm):
    ended = slurm.run("srun", "--mpi=pmi2", "-N2", "-n3", "python", HELLO)
    assert ended.code == 0, ended.output
    for rank in range(3):
        assert f"rank {rank} of 3: torch" in ended.output, ended.output


def test_srun_passes_the_secret_on(slurm):
    """Without one, rank 0 warns; with one on the first node alone, the ranks do not meet."""
    command = ["srun", "-N2", "-n2", "python", HELLO]
    assert "TORCH_RING_SECRET" in slurm.run(*command).output
    with_secret = slurm.run(*command, TORCH_RING_SECRET="hush-hush")
    assert with_secret.code == 0, with_secret.output
    assert "rank 1 of 2: torch" in with_secret.output
    assert "SECRET" not in with_secret.output
    one_knows = 'test $SLURM_PROCID = 0 || unset TORCH_RING_SECRET; exec python "$0"'
    different = slurm.run(*command[:3], "sh", "-c", one_knows, HELLO, TORCH_RING_SECRET="hush-hush")
    assert different.code != 0
    assert "TORCH_RING_SECRET" in different.output, different.output
