# SPDX-License-Identifier: Apache-2.0
"""Manifests of Kubernetes, and a script for Slurm: fields exist, command lines are valid.

The schemas have the fields that the manifests use, as they are in the sources:
api/jobset/v1alpha2 of kubernetes-sigs/jobset, pkg/apis/trainer/v1alpha1 of kubeflow/trainer,
pkg/apis/kubeflow/v2beta1 of kubeflow/mpi-operator, and the core API. Other fields are refused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from scripts import ROOT
from torch.distributed.run import parse_args as torchrun_options

from torch_ring.config import SETTINGS, Config
from torch_ring.run.growth import standby_command
from torch_ring.run.hosts import HostSlots, cluster_hosts
from torch_ring.run.options import parse_options

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

FOLDER = ROOT / "examples" / "kubernetes"
FILES = [*sorted(FOLDER.glob("*.yaml")), ROOT / "examples" / "elastic" / "kubernetes.yaml"]
TORCHRUN_GRACE_S = 30  # for its ranks, from its SIGTERM to their SIGKILL


# --- the schemas


def fields(required: str = "", /, **known: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": known,
    }


def some(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: Any) -> dict[str, Any]:
    return {"enum": [*values]}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "integer", "minimum": 1}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PATH = {"type": "string", "pattern": "^/"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY = {
    "anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}]
}
METADATA = fields(name=NAME, labels=TEXTS)
AMOUNTS = fields(cpu=QUANTITY, memory=QUANTITY)
RESOURCES = fields(limits=AMOUNTS, requests=AMOUNTS)
ENV = fields(
    "name",
    name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    valueFrom=fields(secretKeyRef=fields("name key", name=NAME, key=TEXT)),
)
CONTAINER = fields(
    "name image",
    name=NAME,
    image=TEXT,
    command=some(TEXT),
    workingDir=PATH,
    env=some(ENV),
    readinessProbe=fields(tcpSocket=fields("port", port=NUMBER)),
    resources=RESOURCES,
    volumeMounts=some(fields("name mountPath", name=NAME, mountPath=PATH)),
)
VOLUME = fields(
    "name",
    name=NAME,
    emptyDir=fields(medium=one_of("Memory", "HugePages", ""), sizeLimit=QUANTITY),
    persistentVolumeClaim=fields("claimName", claimName=NAME),
)
POD = fields(
    "containers",
    containers=some(CONTAINER),
    volumes=some(VOLUME),
    restartPolicy=one_of("Never", "OnFailure"),  # of a Job; never Always
    terminationGracePeriodSeconds=COUNT,
)
JOB = fields(
    "template",
    template=fields("spec", spec=POD),
    parallelism=COUNT,
    completions=COUNT,
    completionMode=one_of("Indexed", "NonIndexed"),
    backoffLimit=COUNT,
)
JOBSET = fields(
    "replicatedJobs",
    replicatedJobs=some(
        fields(
            "name template",
            name=NAME,
            template=fields("spec", metadata=METADATA, spec=JOB),
            replicas=COUNT,
        )
    ),
    failurePolicy=fields(maxRestarts=COUNT),
)
RUNTIME = fields(
    "template",
    mlPolicy=fields(numNodes=NUMBER, torch=fields()),
    template=fields("spec", spec=JOBSET),
)
TRAIN_JOB = fields(
    "runtimeRef",
    runtimeRef=fields(
        "name",
        name=NAME,
        apiGroup=one_of("trainer.kubeflow.org"),
        kind=one_of("TrainingRuntime", "ClusterTrainingRuntime"),
    ),
    trainer=fields(
        command=some(TEXT), numNodes=NUMBER, numProcPerNode=NUMBER, resourcesPerNode=RESOURCES
    ),
)
REPLICAS = fields(
    "template",
    replicas=COUNT,
    restartPolicy=one_of("Never", "OnFailure"),
    template=fields("spec", spec=POD),
)
MPI_JOB = fields(
    "mpiReplicaSpecs",
    slotsPerWorker=NUMBER,
    sshAuthMountPath=PATH,
    launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
    runPolicy=fields(cleanPodPolicy=one_of("None", "Running", "All"), backoffLimit=COUNT),
    mpiReplicaSpecs=fields("Launcher", Launcher=REPLICAS, Worker=REPLICAS),
)
CLAIM = fields(
    "accessModes resources",
    accessModes=some(one_of("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod", "ReadOnlyMany")),
    resources=fields("requests", requests=fields("storage", storage=QUANTITY)),
)
SPECS = {
    ("v1", "PersistentVolumeClaim"): CLAIM,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET,
    ("kubeflow.org/v2beta1", "MPIJob"): MPI_JOB,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): RUNTIME,
}


def objects_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_field_is_one_of_the_api(path: Path) -> None:
    for manifest in objects_of(path):
        spec = SPECS.get((manifest["apiVersion"], manifest["kind"]), False)
        schema = fields(
            "apiVersion kind metadata spec",
            apiVersion=TEXT,
            kind=TEXT,
            metadata=METADATA,
            spec=spec,
        )
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(manifest)


# --- the values of the fields


def pods_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the specs of pods in a manifest."""
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, dict) and "containers" in value:
            yield value
        elif isinstance(value, (dict, list)):
            yield from pods_of(value)


def manifest(file: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects_of(FOLDER / file) if each["kind"] == kind)
    return found


def amount(text: str) -> int:
    return int(text.removesuffix("Gi"))


RUNTIME_POD = next(pods_of(manifest("trainjob.yaml", "TrainingRuntime")))
TRAINER = manifest("trainjob.yaml", "TrainJob")["spec"]["trainer"]
JOBSET_POD = next(pods_of(manifest("jobset.yaml", "JobSet")))
LAUNCHER, WORKER = pods_of(manifest("mpijob.yaml", "MPIJob"))
PODS = [RUNTIME_POD, JOBSET_POD, LAUNCHER, WORKER]


def test_a_container_has_room_for_its_shared_memory() -> None:
    limits = [TRAINER["resourcesPerNode"]["limits"]]
    limits += [pod["containers"][0]["resources"]["limits"] for pod in (JOBSET_POD, WORKER)]
    for pod, limit in zip((RUNTIME_POD, JOBSET_POD, WORKER), limits, strict=True):
        mounted = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {*mounted.values()} == {*volumes}
        memory = volumes[mounted["/dev/shm"]]["emptyDir"]
        assert memory["medium"] == "Memory"
        assert amount(memory["sizeLimit"]) < amount(limit["memory"])


def test_a_pod_has_longer_than_its_ranks_after_sigterm() -> None:
    for pod in PODS:
        assert pod["terminationGracePeriodSeconds"] > TORCHRUN_GRACE_S


def test_the_secret_and_the_volume_are_those_that_the_page_makes() -> None:
    page = (FOLDER / "README.md").read_text()
    (name, key) = re.findall(r"create secret generic (\S+) --from-file=(\w+)=", page)[0]
    for pod in (RUNTIME_POD, JOBSET_POD):
        (variable,) = pod["containers"][0]["env"]
        assert variable["name"] == "TORCH_RING_SECRET"
        assert variable["valueFrom"]["secretKeyRef"] == {"name": name, "key": key}
    (claim,) = objects_of(FOLDER / "checkpoints.yaml")
    for pod in PODS:
        claims = [
            each["persistentVolumeClaim"] for each in pod["volumes"] if "emptyDir" not in each
        ]
        assert claims == [{"claimName": claim["metadata"]["name"]}]
    for file in re.findall(r"kubectl \w+ -f (\S+)", page):
        assert (FOLDER / file).exists()


def test_every_setting_exists() -> None:
    names = {setting.variable for setting in SETTINGS}
    for path in FILES:
        assert {*re.findall(r"\bTORCH_RING_\w+", path.read_text())} <= names, path
    used = re.findall(r"\bTORCH_RING_\w+", "".join(path.read_text() for path in FILES))
    assert "TORCH_RING_SECRET" in used


def test_a_job_names_its_runtime() -> None:
    runtime = manifest("trainjob.yaml", "TrainingRuntime")
    reference = manifest("trainjob.yaml", "TrainJob")["spec"]["runtimeRef"]
    group, _, _ = runtime["apiVersion"].partition("/")
    assert reference == {"apiGroup": group, "kind": runtime["kind"], "name": "torch-ring"}
    assert runtime["metadata"]["name"] == reference["name"]
    # Trainer puts the command and the variables of torchrun into a container of this name, in the
    # job that has the label.
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == RUNTIME_POD["containers"][0]["name"] == "node"
    assert job["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }


# --- the command lines


def command_line(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Return the program call of a pod's command, with the image's files and volume in `folder`."""
    for program in ("torchrun", "torch_ring_run"):
        stand_in = folder / program
        stand_in.write_text('#!/bin/sh\npwd\nbasename $0\nprintf "%s\\n" "$@"\n')
        stand_in.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    program, option, script = command
    script = script.replace("/workspace", str(folder)).replace("/checkpoints", str(folder))
    ended = subprocess.run(
        [program, option, script],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def require_mnist(script: str, arguments: list[str], folder: Path, resumes: bool) -> None:
    """Check the program in the example's folder and its options."""
    example = ROOT / "examples" / "mnist"
    assert (example / script).exists()
    sys.path.insert(0, str(example))
    try:
        with mock.patch("sys.argv", [script, *arguments]):
            import options  # type: ignore[import-not-found]

            parsed = options.parse_args()
    finally:
        sys.path.remove(str(example))
        sys.modules.pop("options", None)
    assert parsed.dataset == "digits"  # nothing is downloaded
    assert parsed.checkpoint == folder / "mnist.pt"
    assert parsed.resume is resumes


RESUMES = pytest.mark.parametrize("resumes", [False, True], ids=["first", "resumed"])


@RESUMES
@pytest.mark.parametrize("file", ["trainjob.yaml", "jobset.yaml"])
def test_torchrun_starts_the_ranks(file, resumes, tmp_path, monkeypatch) -> None:
    if resumes:
        (tmp_path / "mnist.pt").touch()
    if file == "trainjob.yaml":
        assert (TRAINER["numNodes"], TRAINER["numProcPerNode"]) == (2, 2)
        place, *line = command_line(TRAINER["command"], tmp_path)
        # Trainer's: see EnforceMLPolicy of its plugin for torch.
        monkeypatch.setenv("PET_NNODES", "2")
        monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
        monkeypatch.setenv("PET_NODE_RANK", "1")
        monkeypatch.setenv("PET_MASTER_ADDR", "mnist-node-0-0.mnist")
        monkeypatch.setenv("PET_MASTER_PORT", "29500")
    else:
        jobset = manifest(file, "JobSet")
        (job,) = jobset["spec"]["replicatedJobs"]
        pods = job["template"]["spec"]
        assert (pods["completions"], pods["parallelism"], pods["completionMode"]) == (
            2,
            2,
            "Indexed",
        )
        assert (jobset["metadata"]["name"], job["name"], job["replicas"]) == ("mnist", "node", 1)
        command = JOBSET_POD["containers"][0]["command"]
        _, *line = command_line(command, tmp_path, JOB_COMPLETION_INDEX="1")
        place = JOBSET_POD["containers"][0]["workingDir"].replace("/workspace", str(tmp_path))
    assert line[0] == "torchrun"
    options = torchrun_options(line[1:])
    assert (options.nnodes, options.nproc_per_node, int(options.node_rank)) == ("2", "2", 1)
    assert (options.master_addr, int(options.master_port)) == ("mnist-node-0-0.mnist", 29500)
    assert place == str(tmp_path / "examples" / "mnist")
    require_mnist(options.training_script, options.training_script_args, tmp_path, resumes)


@RESUMES
def test_our_launcher_starts_the_ranks(resumes, tmp_path) -> None:
    if resumes:
        (tmp_path / "mnist.pt").touch()
    (launcher,) = LAUNCHER["containers"]
    _, *line = command_line(launcher["command"], tmp_path)
    assert line[0] == "torch_ring_run"
    options = parse_options(line[1:], line[0])
    python, script, *arguments = options.command
    assert python == "python"
    assert launcher["workingDir"] == "/workspace/examples/mnist"
    require_mnist(script, arguments, tmp_path, resumes)
    # The operator writes a line for each worker, with its slots: the ranks start there.
    job = manifest("mpijob.yaml", "MPIJob")["spec"]
    workers = [f"mnist-worker-{number}.mnist" for number in range(2)]
    assert job["mpiReplicaSpecs"]["Worker"]["replicas"] == len(workers)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots={job['slotsPerWorker']}\n" for name in workers))
    assert (options.hosts, options.hostfile, options.num_proc) == (None, None, None)
    hosts = cluster_hosts({"OMPI_MCA_orte_default_hostfile": str(hostfile)})
    assert hosts == (
        [HostSlots(name, 2) for name in workers],
        "OMPI_MCA_orte_default_hostfile",
    )


ELASTIC = ROOT / "examples" / "elastic"


def test_the_command_of_the_kubernetes_job():
    job = yaml.safe_load((ELASTIC / "kubernetes.yaml").read_text())
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    program, *arguments = launcher["command"]
    assert program == "torch_ring_run"
    options = parse_options(arguments, program)
    assert options.host_discovery_script == "/etc/mpi/discover_hosts.sh"
    assert (options.min_num_proc, options.max_num_proc, options.slots) == (2, 8, 1)
    assert (options.reset_limit, options.cooldown_range, options.standby) == (None, (10, 300), 1)
    assert standby_command(options.command)[-1] == "train.py"
    assert 2 <= replicas["Worker"]["replicas"] <= 8


def test_the_slurm_script(tmp_path):
    """With a stand-in for srun, which prints its arguments."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\nenv | grep ^TORCH_RING_\n')
    srun.chmod(0o755)
    script = ELASTIC / "slurm.sbatch"
    ended = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    command, *variables = ended.stdout.splitlines()
    assert command == "--kill-on-bad-exit=0 --no-kill --wait=0 python train.py"
    config = Config.from_environment(dict(line.split("=", 1) for line in variables))
    assert (len(config.secret), config.min_ranks) == (64, 2)
    assert "#SBATCH --no-kill\n" in script.read_text()
