# SPDX-License-Identifier: Apache-2.0
"""The command line of the launcher: a horovodrun line means the same."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.job_settings import JobSpec, job_variables, secret_of
from torch_ring.run.options import Options, parse_options


def parse(*arguments: str) -> Options:
    return parse_options(arguments, "torch_ring_run")


def test_a_line_of_horovodrun():
    line = (
        "-np 16 -H server1:4,server2:4,server3:4,server4:4 -p 2222 -i key --start-timeout 60 "
        "--grace-period 90 --requeue "
        "--output-filename out --verbose --network-interface eth0,eth1 --network-interface ib0 "
        "--fusion-threshold-mb 32 --cycle-time-ms 3.5 --no-stall-check --log-level WARNING "
        "--prefix-output-with-timestamp --numa-binding=core-complex "
        "--timeline-filename t.json --timeline-mark-cycles "
        "python train.py --lr 1 -np 3 --verbose"
    )
    options = parse(*line.split())
    assert options == Options(
        command=["python", "train.py", "--lr", "1", "-np", "3", "--verbose"],
        num_proc=16,
        hosts="server1:4,server2:4,server3:4,server4:4",
        ssh_port=2222,
        ssh_identity_file="key",
        start_timeout=60,
        grace_period=90,
        requeue=True,
        output_filename="out",
        network_interface="eth0,eth1,ib0",
        variables={
            "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
            "HOROVOD_CYCLE_TIME": "3.5",
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_LOG_LEVEL": "WARNING",
            "HOROVOD_TIMELINE": "t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        },
        prefix_output_with_timestamp=True,
        verbose=True,
        numa_binding="core-complex",
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "--num-proc 2 -hostfile hosts -prefix-timestamp -- ls --",
            {"num_proc": 2, "hostfile": "hosts", "command": ["ls", "--"]},
        ),
        ("--check-build", {"shows": "build"}),
        ("-v", {"shows": "version"}),
        (
            "-np 2 --host-discovery-script ./hosts.sh --slots 4 --max-np 8 --reset-limit 0 "
            "--blacklist-cooldown-range 10 100 --standby 2 python train.py",
            {
                **{"least": 2, "max_num_proc": 8, "host_discovery_script": "./hosts.sh"},
                **{"slots": 4, "reset_limit": 0, "cooldown_range": (10, 100), "standby": 2},
            },
        ),
        (
            "-np 4 --min-np 2 --elastic-timeout 5 true",
            {
                **{"least": 2, "grows": False, "notes": ()},
                "variables": {"TORCH_RING_ELASTIC_TIMEOUT": "5.0"},
            },
        ),
        ("true", {"least": None, "grows": False, "standby": 0, "numa_binding": ""}),
        ("--no-autotune true", {"variables": {"HOROVOD_AUTOTUNE": "0"}}),
        ("--no-stall-check --stall-check", {"variables": {"HOROVOD_STALL_CHECK_DISABLE": "0"}}),
        ("--hierarchical-allreduce --no-hierarchical-allreduce", {"notes": (), "variables": {}}),
        ("--cycle-time-ms 3 true", {"variables": {"HOROVOD_CYCLE_TIME": "3.0"}, "notes": ()}),
    ],
)
def test_a_line(line, wanted):
    options = parse(*line.split())
    assert {name: getattr(options, name) for name in wanted} == wanted


def test_the_time_to_start_may_be_a_variable():
    def time_of(*arguments: str, **environment: str) -> float:
        return JobSpec(parse(*arguments), [], environment, "secret").start_timeout_s

    assert time_of() == 30
    assert time_of(HOROVOD_START_TIMEOUT="45") == 45
    assert time_of("--start-timeout", "5", HOROVOD_START_TIMEOUT="45") == 5
    with pytest.raises(InvalidArgumentError, match="HOROVOD_START_TIMEOUT='soon'"):
        time_of(HOROVOD_START_TIMEOUT="soon")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--standby 1", "--standby needs --max-np, or --host-discovery-script"),
        ("--min-np 1 --blacklist-cooldown-range 1 2", "needs --max-np, or --host-discovery-script"),
        ("--reset-limit 3", "--reset-limit needs --min-np"),
        ("--max-np 3", "--max-np 3 needs --min-np"),
        ("-H a:1 --hostfile b", "give hosts or a host file, and not both"),
        ("--min-np 3 --max-np 2", "--min-np 3 is more than --max-np 2"),
        ("--host-discovery-script ./hosts.sh -H a:1", "leave out -H and --hostfile"),
        ("--min-np 1 --max-np 2 --blacklist-cooldown-range 3 2", "3 2: the first must not be more"),
    ],
)
def test_options_of_growth_that_lack_others_are_refused(line, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        parse(*line.split(), "python", "train.py")


def test_options_without_effect_are_told():
    lines = ("--gloo", "--mpi", "--disable-cache", "--mpi-args=--map-by=slot", "--cache-capacity=3")
    for line in (*lines, "--log-without-timestamp", "--hierarchical-allgather"):
        (note,) = parse(line, "-np", "2", "true").notes
        assert note.startswith(f"{line.partition('=')[0]} changes nothing: ")


def test_variables_for_the_ranks():
    wanted = parse("--env", "A=1=2", "--env", "B", "--env", "C=", "true")
    assert job_variables(wanted, {"B": "b", "D": "d"})[0] == {"A": "1=2", "B": "b", "C": ""}
    of_elastic = job_variables(parse("--min-np", "2", "--max-np", "8", "true"), {})[0]
    assert of_elastic == {"TORCH_RING_MIN_RANKS": "2"}
    with pytest.raises(InvalidArgumentError, match="--env B: is not set here"):
        job_variables(wanted, {})
    with pytest.raises(InvalidArgumentError, match="must be NAME or NAME=VALUE"):
        parse("--env", "=3", "true")


def test_an_option_goes_before_the_environment():
    wanted = parse("--fusion-threshold-mb", "1", "true")
    _, unset = job_variables(wanted, {"TORCH_RING_FUSION_THRESHOLD": "5"})
    assert "TORCH_RING_FUSION_THRESHOLD" in unset
    assert "TORCH_RING_TIMEOUT" not in unset
    assert "TORCH_RING_SECRET_FILE" in unset  # which other hosts may lack
    wanted = replace(wanted, env={"TORCH_RING_FUSION_THRESHOLD": "7"})
    assert "TORCH_RING_FUSION_THRESHOLD" not in job_variables(wanted, {})[1]


def test_the_secret_is_the_users_or_new(tmp_path):
    assert secret_of({}, {}) != secret_of({}, {})
    assert len(secret_of({}, {})) == 64
    assert secret_of({"TORCH_RING_SECRET": "a"}, {}) == "a"
    assert secret_of({"TORCH_RING_SECRET": "a"}, {"TORCH_RING_SECRET": "b"}) == "b"
    file = tmp_path / "secret"
    file.write_text("c\n")
    file.chmod(0o600)
    assert secret_of({"TORCH_RING_SECRET_FILE": str(file)}, {}) == "c"
    file.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="other users may use it"):
        secret_of({"TORCH_RING_SECRET_FILE": str(file)}, {})


CONFIG = """
verbose: true
controller: gloo
params:
  fusion_threshold_mb: 16
  cycle-time-ms: 2
autotune:
  enabled: true
  log_file: tune.csv
timeline:
  filename: timeline.json
stall_check:
  enabled: false
  shutdown_time_seconds: 90
library_options:
  num_nccl_streams: 2
logging:
  level: INFO
"""


def test_a_configuration_file(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    options = parse("--cycle-time-ms", "5", "--config-file", str(file), "true")
    assert options.verbose
    assert options.notes == ("--num-nccl-streams changes nothing: torch_ring has no use for it",)
    assert options.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(16 << 20),
        "HOROVOD_CYCLE_TIME": "5.0",  # the command line goes first
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "tune.csv",
        "HOROVOD_TIMELINE": "timeline.json",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        "HOROVOD_LOG_LEVEL": "INFO",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params:\n  speed: 3", "no option: speed"),
        ("params:\n  fusion_threshold_mb: much", "--fusion-threshold-mb 'much': must be a number"),
        ("params:\n  cycle_time_ms: -1", "--cycle-time-ms -1: must be 0 or more"),
        ("pramas: {}", "'pramas' is not a section"),
        ("- 1", "must have sections"),
    ],
)
def test_a_wrong_configuration_file(tmp_path, text, message):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        parse("--config-file", str(file), "true")


@pytest.mark.parametrize(
    "line",
    [
        "-np 0",
        "-np two",
        "--log-level LOUD",
        "--numa-binding nodes",
        "--nopt",
    ],
)
def test_a_wrong_line_is_told(line, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(*line.split(), "true")
    assert refused.value.code == 2
    assert line.split()[-2 if " " in line else -1] in capsys.readouterr().err
