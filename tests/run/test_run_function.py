# SPDX-License-Identifier: Apache-2.0
"""torch_ring.run.run(): a function on ranks, and its results."""

from __future__ import annotations

import os
import re
import threading

import pytest
from rank_functions import (
    fail_on_one,
    leave_quietly,
    place,
    raise_on_one,
    say,
    survive,
    variables,
)

from torch_ring.errors import InvalidArgumentError
from torch_ring.run import run

pytestmark = pytest.mark.launcher


def test_results_come_by_rank():
    assert run(place, np=3) == [(0, 3), (1, 3), (2, 3)]
    assert run(place, (10,), {"plus": 1}, np=2) == [(1, 2), (11, 2)]
    assert run(place) == [(0, 1)]
    assert run(place, hosts="localhost:2") == [(0, 2), (1, 2)]


def test_the_arguments_of_horovods_run(capsys):
    """They have Horovod's order; those without effect are reported, as on the command line."""
    assert run(place, (), None, 2, None, None, None) == [(0, 2), (1, 2)]
    results = run(
        place,
        num_proc=1,
        disable_cache=True,
        use_mpi=True,
        mpi_args="-x A",
        use_gloo=False,
        prefix_output_with_timestamp=True,
        network_interface="lo",
        verbose=2,
    )
    assert results == [(0, 1)]
    said = capsys.readouterr().err
    for name in ("disable_cache", "use_mpi", "mpi_args"):
        assert f"torch_ring.run: {name} changes nothing: " in said
    assert "use_gloo" not in said
    assert "rank 0 starts on localhost" in said  # verbose
    run(say, prefix_output_with_timestamp=True)
    assert re.fullmatch(r"\w{3} \w{3} .* \d{4}\[0\]<stdout>:hello\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 2, "np": 3}, "num_proc=2 and np=3: give one of them"),
        ({"np": 2, "cooldown_range": (1, 2)}, "--blacklist-cooldown-range needs --max-np"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        run(place, **arguments)


def test_the_others_go_on(capsys):
    assert run(fail_on_one, np=3, min_np=2) == [0, 2]
    assert "failed with exit code 9: the other 2 go on" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="rank 1 on localhost failed with exit code 9"):
        run(fail_on_one, np=3)


@pytest.mark.slow
def test_a_rank_of_an_elastic_function_is_replaced():
    results = run(survive, num_proc=2, min_num_proc=1, max_num_proc=2)
    assert len(results) == 2
    (steps, size), other = results
    assert other == (steps, size)
    assert steps >= 5
    assert size == 2


def test_what_only_cloudpickle_takes():
    pytest.importorskip("cloudpickle")
    local = 5
    assert run(lambda: local + int(os.environ["RANK"]), np=2) == [5, 6]


def test_large_arguments_and_results():
    """More data than pipes hold, in both directions at once."""
    data = bytes(range(256)) * 40_000
    assert run(bytes.__add__, (data, b"!"), np=2) == [data + b"!"] * 2


def test_a_function_in_a_thread():
    """Outside the main thread the launcher handles no signals."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(place, np=2)))
    thread.start()
    thread.join(60)
    assert results == [[(0, 2), (1, 2)]]


def test_what_ranks_print_comes_with_their_numbers(capsys, tmp_path):
    run(say, np=2, output_filename=str(tmp_path))
    out, errors = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert sorted(errors.splitlines()) == ["[0]<stderr>:trouble", "[1]<stderr>:trouble"]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("value", "LookupError: nothing there", LookupError),
        ("own", "OwnError: a", None),
        ("exit", "SystemExit: 3", SystemExit),
    ],
)
def test_an_error_has_the_traceback_of_its_rank(kind, message, cause):
    with pytest.raises(RuntimeError, match=f"rank 1 on localhost (?s:.*){message}") as it:
        run(raise_on_one, (kind,), np=2)
    assert type(it.value.__cause__) is (cause or type(None))
    assert kind == "exit" or "in raise_on_one" in str(it.value)


def test_a_rank_without_a_result():
    with pytest.raises(RuntimeError, match="rank 0 on localhost has ended without a result"):
        run(leave_quietly, np=2)
    with pytest.raises(RuntimeError, match="pickle"):
        run(threading.Lock)


def test_what_cannot_be_sent():
    with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
        run(place, (threading.Lock(),))


def test_variables_and_a_secret_of_each_start():
    first, second = (run(variables, np=2, env={"GREETING": "hi"}) for _ in range(2))
    assert first[0] == first[1]
    assert first[0][0] == "hi"
    assert first[0] != second[0]
