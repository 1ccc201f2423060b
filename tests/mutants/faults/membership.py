# SPDX-License-Identifier: Apache-2.0
"""Faults of membership: the processes of an elastic job, and their messages."""

from __future__ import annotations

from faults.fault import Fault, Room

MEMBER = "torch_ring/membership/member.py"
LISTENER = "torch_ring/membership/listener.py"
DIRECTORY = "torch_ring/membership/directory.py"
FIRST = "torch_ring/membership/first_world.py"

# fmt: off
FAULTS = (
    Fault(
        "message_unchecked", "a stranger's message is believed", MEMBER,
        """        if not hmac.compare_digest(
            tag, self._tag(not self._accepted, self._received, header + data)
        ):
""", "        if False:\n",
        tests=("elastic/test_regroup.py::test_a_stranger_is_not_answered",),
    ),
    Fault(
        "message_repeated", "a message may be repeated", MEMBER,
        "head = self._nonce + bytes([by_acceptor]) + _NUMBER.pack(number)",
        "head = bytes([by_acceptor]) + _NUMBER.pack(number)",
        tests=("elastic/test_regroup.py::test_a_message_cannot_be_repeated",),
    ),
    Fault(
        "message_reflected", "a message may be sent back to its sender", MEMBER,
        "head = self._nonce + bytes([by_acceptor]) + _NUMBER.pack(number)",
        "head = self._nonce + _NUMBER.pack(number)",
        tests=("elastic/test_regroup.py::test_a_message_cannot_be_repeated",),
    ),
    Fault(
        "stopped_is_gone", "a stopped process counts as gone", MEMBER,
        "    except TimeoutError:\n        return Reach.SILENT\n",
        "    except TimeoutError:\n        return Reach.GONE\n",
        tests=("elastic/test_regroup.py::test_reach",),
    ),
    Fault(
        "cut_off_is_gone", "a process whose host cannot be reached counts as gone", MEMBER,
        "        return Reach.CUT_OFF\n", "        return Reach.GONE\n",
        tests=("elastic/test_regroup.py::test_a_host_that_is_silent_already_gets_less_time",),
    ),
    Fault(
        "no_keep_alive", "a process that dies while it is called counts as stopped", MEMBER,
        "        connection.setsockopt(level, option, value)\n", "        pass\n",
        tests=("elastic/test_regroup.py::test_a_process_that_dies_while_it_is_called_is_gone",),
    ),
    Fault(
        "suspect_patience", "a silent host is waited for as long as another", MEMBER,
        "timeout_s = _SILENT_CONNECT_S if is_suspect else _CONNECT_S", "timeout_s = _CONNECT_S",
        tests=("elastic/test_regroup.py::test_a_host_that_is_silent_already_gets_less_time",),
    ),
    Fault(
        "left_out_joins", "a process that was left out joins again", LISTENER,
        "        elif self._knows(member):\n", "        elif True:\n",
        tests=("elastic/test_regroup.py::test_one_that_was_left_out_hears_of_it",),
    ),
    Fault(
        "left_out_waits", "a process that waited for another leader waits for ever", LISTENER,
        'request.answer({"kind": "left out"})', "pass",
        tests=("elastic/test_regroup.py::test_one_that_waited_for_another_leader_hears_that_it_was_left_out",),
    ),
    Fault(
        "newcomer_of_earlier_function", "a newcomer joins a function that is over", LISTENER,
        'request["call"] < self._call:', "False:",
        tests=("elastic/test_two_functions.py",),
    ),
    Fault(
        "dead_newcomer", "a newcomer that has died is let in", LISTENER,
        "            if not request.channel.is_closed():\n", "            if True:\n",
        tests=("elastic/test_regroup.py::test_a_newcomer_that_has_died_is_not_let_in",),
    ),
    Fault(
        "older_world", "the report of an earlier world replaces that of a later one", DIRECTORY,
        """if request["kind"] == "roster" and request["generation"] > self._generation:""",
        """if request["kind"] == "roster":""",
        tests=("elastic/test_regroup.py::test_directory",),
    ),
    Fault(
        "resets_of_functions", "the first world of an elastic function counts as a change",
        DIRECTORY,
        "return max(0, self._generation - max(1, self._functions))",
        "return max(0, self._generation - 1)",
        tests=("elastic/test_regroup.py::test_directory",),
    ),
    Fault(
        "place_of_dead", "the first world waits for a process that has died", DIRECTORY,
        "            self._expected = dict(processes)\n            self._answer()\n",
        "            self._expected = self._expected or dict(processes)\n"
        "            self._answer()\n",
        tests=("elastic/test_first_world.py::test_those_that_have_died_are_not_waited_for",),
    ),
    Fault(
        "void_unseen", "a world is made of which a process has ended", DIRECTORY,
        'return {"kind": "void", "gone": gone} if gone else answer', "return answer",
        tests=("elastic/test_first_world.py::test_a_world_is_void_when_one_of_its_processes_has_ended",),
    ),
    Fault(
        "too_few_begin", "fewer ranks begin than TORCH_RING_MIN_RANKS", FIRST,
        "if size < config.min_ranks:", "if False:",
        tests=("elastic/test_first_world.py::test_too_few_are_left",),
    ),
    Fault(
        "first_world_again", "a failure in which nobody dies is tried again for ever", FIRST,
        "if failure is not None and processes == before:", "if False:",
        tests=("elastic/test_first_world.py::test_a_failure_in_which_nobody_dies_is_raised",),
    ),
    Fault(
        "late_unnamed", "the error of a late process names the ranks that are here", FIRST,
        "raise missing_ranks(set(range(size)).difference(missing), size, deadline)",
        "raise missing_ranks(missing, size, deadline)",
        tests=("elastic/test_first_world.py::test_a_rank_that_lives_and_does_not_come_is_named",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/elastic", "tests/run"))
