# SPDX-License-Identifier: Apache-2.0
"""Settings from the environment."""

import pytest

from torch_ring.config import SETTINGS, Config, misspelt, variables_set
from torch_ring.errors import InvalidArgumentError


def test_settings_have_defaults():
    config = Config.from_environment({})
    assert config == Config()
    assert (config.stall_warning_s, config.timeout_s) == (60, 0)  # a late rank ends no job
    assert Config.from_environment({s.variable: " " for s in SETTINGS}) == Config()
    fields = {setting.field for setting in SETTINGS}
    # The names of timeouts come from the same settings as the timeouts.
    # The words of errors are those of the door (torch.distributed has its own).
    assert fields | {"timeout_name", "init_timeout_name", "words"} == set(
        Config.__dataclass_fields__
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TORCH_RING_TRANSPORT", "TCP", "transport", "tcp"),
        ("TORCH_RING_TIMEOUT", "1.5", "timeout_s", 1.5),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "timeout_s", 90.0),
        ("TORCH_RING_FUSION_WINDOW", "2", "fusion_window_s", 0.002),
        ("TORCH_RING_BUCKET_BYTES", "1000", "bucket_bytes", 1000),
        ("TORCH_RING_INTERFACE", "ib0, ib1", "interface", "ib0,ib1"),
        ("TORCH_RING_CONNECTIONS", "4", "connections", 4),
        ("TORCH_RING_CHECKSUM", "1", "checksum", 1),
        ("TORCH_RING_SECRET_FILE", "/a/b", "secret_file", "/a/b"),
        ("TORCH_RING_TRUST_NETWORK", "false", "trust_network", False),
        ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_threshold_bytes", 0),
        ("HOROVOD_CYCLE_TIME", "5", "fusion_window_s", 0.005),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7", "stall_warning_s", 7.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning_s", 0.0),
        ("HOROVOD_LOG_LEVEL", "trace", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "1", "log_level", "warning"),  # not a name: Horovod does the same
    ],
)
def test_values_of_settings(variable, text, field, value):
    assert getattr(Config.from_environment({variable: text}), field) == value


def test_variables_of_torch_ring_go_before_those_of_horovod():
    horovods = {"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}
    assert Config.from_environment(horovods).stall_warning_s == 7
    horovods["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    assert Config.from_environment(horovods).stall_warning_s == 0
    horovods["TORCH_RING_STALL_WARNING"] = "9"
    assert Config.from_environment(horovods).stall_warning_s == 9


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TORCH_RING_TRANSPORT", "rdma", "must be one of auto, shm, tcp"),
        ("TORCH_RING_TIMEOUT", "nan", "from 0 to"),
        ("TORCH_RING_TIMEOUT", "1e300", "from 0 to"),
        ("TORCH_RING_INIT_TIMEOUT", "0", "from 0.1"),
        ("TORCH_RING_BUCKET_BYTES", "1e6", "whole number of bytes, 1 or more"),
        ("TORCH_RING_INTERFACE", "eth0,", "must be names of network interfaces, with one comma"),
        ("TORCH_RING_INTERFACE", "eth0,eth1,eth0", "each interface once, and names eth0 2 times"),
        ("TORCH_RING_CONNECTIONS", "0", "whole number from 1 to 64"),
        ("TORCH_RING_TRUST_NETWORK", "yes", "must be one of 0, 1, false, true"),
        ("HOROVOD_CYCLE_TIME", "1e8", "from 0 to 1000"),
        ("HOROVOD_STALL_CHECK_DISABLE", "maybe", "must be one of"),
    ],
)
def test_errors_name_the_variable_its_value_and_the_choice(variable, text, message):
    with pytest.raises(InvalidArgumentError, match=f"{variable}='{text}': .*{message}"):
        Config.from_environment({variable: text})


def test_connections_are_of_each_interface():
    both = {"TORCH_RING_INTERFACE": "a,b", "TORCH_RING_CONNECTIONS": "32"}
    assert Config.from_environment(both).width == 64
    assert Config.from_environment({}).width == 1
    with pytest.raises(InvalidArgumentError, match="='a,b': there are at most 64 connections"):
        Config.from_environment(both | {"TORCH_RING_CONNECTIONS": "33"})


def test_secrets_are_not_shown():
    assert "hush" not in repr(Config(secret="hush"))
    assert "TORCH_RING_SECRET" not in Config().common()
    environment = {
        "TORCH_RING_SECRET": "hush",
        "TORCH_RING_SERCET": "hush",
        "HOROVOD_SECRET_KEY": "hush",
        "TORCH_RING_TRANSPORT": "tcp",
        "HOROVOD_CYCLE_TIME": "5",
        "HOME": "/root",
    }
    unknown = "(not a setting of torch_ring)"
    assert variables_set(environment) == {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_SECRET_KEY": unknown,
        "TORCH_RING_SECRET": "(set, not shown)",
        "TORCH_RING_SERCET": unknown,
        "TORCH_RING_TRANSPORT": "tcp",
    }


def test_misspelt_variables_are_named_without_their_values():
    assert misspelt({setting.variable: "" for setting in SETTINGS} | {"HOROVOD_RANK": "0"}) is None
    found = misspelt({"TORCH_RING_SERCET": "hush", "TORCH_RING_COLOUR": "red", "PATH": ""})
    assert found == (
        "no setting of torch_ring, ignored: TORCH_RING_COLOUR, TORCH_RING_SERCET (do you mean "
        "TORCH_RING_SECRET?)"
    )
