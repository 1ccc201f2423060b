# SPDX-License-Identifier: Apache-2.0
"""Faults of membership: the processes of an elastic job, and their messages."""

from __future__ import annotations

from faults.fault import Fault, Room

MEMBER = "torch_ring/membership/member.py"
TLS = "torch_ring/membership/tls.py"
LISTENER = "torch_ring/membership/listener.py"
DIRECTORY = "torch_ring/membership/directory.py"
FIRST = "torch_ring/membership/first_world.py"
LAUNCH = "torch_ring/run/launch.py"

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
        "message_in_the_clear", "messages cross the network as they are", MEMBER,
        """            self._stream = TlsStream(connection, key.secret, address, accepts=accepted)
""", """            connection.sendall(_HELLO)
            self._read(len(_HELLO))
""",
        tests=("elastic/test_encrypted_messages.py::test_nobody_on_the_way_can_read",),
    ),
    Fault(
        "message_redirected", "a call may be redirected to another process of the job", TLS,
        "_INFO + name.encode()", "_INFO",
        tests=("elastic/test_encrypted_messages.py::test_others_are_refused_at_once",),
    ),
    Fault(
        "message_certificate", "a stranger with a certificate is taken for a process", TLS,
        "if openssl.SSL_session_reused(ssl) != 1:", "if False:",
        tests=("elastic/test_encrypted_messages.py::test_a_certificate_is_no_key",),
    ),
    Fault(
        "message_trickled", "a handshake may last as long as single bytes come", TLS,
        "connection.settimeout(max(_LEAST_WAIT_S, end - time.monotonic()))", "pass",
        tests=("elastic/test_encrypted_messages.py::test_bytes_that_trickle_into_the_handshake_end_in_time",),
    ),
    Fault(
        "message_no_hello", "a caller without TLS waits in vain for an end with TLS", MEMBER,
        "            connection.sendall(_HELLO)\n", "            pass\n",
        tests=("elastic/test_encrypted_messages.py::test_others_are_refused_at_once",),
    ),
    Fault(
        "launcher_in_the_clear", "the launcher does not encrypt what its ranks do", LAUNCH,
        "key_of(secret, config.tls)", 'key_of(secret, "0")',
        tests=("run/test_run_elastic.py::test_nobody_on_the_way_reads_the_messages_of_a_job_that_grows",),
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
