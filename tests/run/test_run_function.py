"""torch_ring.run.run(): a function on ranks, and its results."""

from __future__ import annotations

import os
import threading

import pytest
from rank_functions import averages, leave_quietly, place, raise_on_one, say, variables

from torch_ring.errors import InvalidArgumentError
from torch_ring.run import run

pytestmark = pytest.mark.launcher


def test_results_come_by_rank():
    assert run(place, np=3) == [(0, 3), (1, 3), (2, 3)]
    assert run(place, (10,), {"plus": 1}, np=2) == [(1, 2), (11, 2)]
    assert run(place) == [(0, 1)]
    assert run(place, hosts="localhost:2") == [(0, 2), (1, 2)]


def test_what_only_cloudpickle_takes():
    pytest.importorskip("cloudpickle")
    local = 5
    assert run(lambda: local + int(os.environ["RANK"]), np=2) == [5, 6]


def test_large_arguments_and_results():
    """More than pipes hold, in both directions at once."""
    data = bytes(range(256)) * 40_000
    assert run(bytes.__add__, (data, b"!"), np=2) == [data + b"!"] * 2


def test_a_function_in_a_thread():
    """There the launcher takes no signals."""
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
        ("leave", "rank 1 on localhost failed with exit code 9", None),
        ("kill", "rank 1 on localhost was ended by SIGKILL", None),
    ],
)
def test_an_error_has_the_traceback_of_its_rank(kind, message, cause):
    with pytest.raises(RuntimeError, match=f"rank 1 on localhost (?s:.*){message}|{message}") as it:
        run(raise_on_one, (kind,), np=3)
    assert type(it.value.__cause__) is (cause or type(None))
    if kind in ("value", "own"):
        assert "in raise_on_one" in str(it.value)


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


def test_a_function_that_trains():
    assert run(averages, np=2) == [(False, 0.5)] * 2
