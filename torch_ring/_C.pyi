# SPDX-License-Identifier: Apache-2.0
"""The native module: engine, communicators and gradient hooks (csrc/bindings)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor, device
from torch._C._distributed_c10d import Backend
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import TypedDict, Unpack

from torch_ring.config import Config

BUILT_FOR_TORCH: str
"""The torch version that the module was compiled against."""

class CollectiveTraits:
    """A row of csrc/engine/collectives.inc."""

    name: str
    torch: str
    has_groups: bool

COLLECTIVES: Sequence[CollectiveTraits]

def make_memory(ranks: int, table: bytes, most_bytes: int) -> int:
    """Return a new memfd: the shared memory of a host with `ranks` ranks, and `table` in it.

    Its size is that of the address space which every rank needs for it: at most `most_bytes`, and
    the table. Errors: RingError, also if these are too few.
    """

def least_memory(ranks: int) -> int:
    """Return the fewest bytes for `ranks` ranks. Errors: InvalidArgumentError: too many ranks."""

def mappable_bytes() -> int:
    """Return the bytes of address space that this process can spare; 0: none."""

def memory_table(fd: int) -> bytes:
    """Return the table in such a memfd. Errors: RingError, also for any other descriptor."""

def nccl_version(library: str) -> int:
    """Return NCCL's version at a path (empty: torch's, or the system's): 22703 is 2.27.3.

    Errors: InvalidArgumentError if there is no NCCL, or it is too old.
    """

def ucx_found(library: str) -> tuple[str, str, list[str]]:
    """Load UCX, and return its version, path and the transports by which it reaches other hosts.

    ``("1.22.0", "/usr/lib/libucp.so.0", ["rc_mlx5", "tcp"])``; none if UCX_TLS excludes them.

    Args:
        library: path of libucp.so.0; empty: the one that is loaded, or the system's.

    Errors: InvalidArgumentError if there is none, or it is too old; RingError if it does not work.
    """

def device_in_use() -> device | None:
    """Return the device that this process drives from its first collective on one; None so far."""

def empty_result_like(like: Tensor) -> Tensor:
    """Return an uninitialised tensor with the shape, layout, dtype and device of `like`.

    It requires no gradient. On the CPU, from 4 MiB on, its memory comes from a pool of pages, and
    returns there with it.
    """

def keep_results(most_bytes: int) -> None:
    """Keep at most `most_bytes` of results' pages in this process; none before the first call."""

def kept_result_bytes() -> int:
    """Return the bytes of results' pages that are kept now."""

def arm_failpoints(spec: str) -> None:
    """Make this process fail where a test says, in place of earlier ones; "" for nowhere.

    Errors: InvalidArgumentError. CONTRIBUTING.md has the syntax.
    """

def await_calls(patience_s: float) -> bool:
    """Wait until no thread is in a call that waits for other ranks; return whether that is so."""

def forget_calls() -> None:
    """Count no calls of the parent's threads in a forked child."""

def limit_to_raise(error: int) -> str:
    """Return which limit to raise for an errno: ": raise `ulimit -n` (now 128)", or ""."""

class StoreCall:
    """One call of a store, on a thread of its own (csrc/bindings/store_call.h)."""

    @staticmethod
    def connect(host: str, port: int, timeout_s: float) -> StoreCall:
        """Connect to a TCPStore; the result is the store."""

    @staticmethod
    def serve(host: str, port: int, timeout_s: float, listening: int | None) -> StoreCall:
        """Serve a TCPStore, at a socket that listens if one is given; the result is the store."""

    @staticmethod
    def resolve(host: str) -> StoreCall:
        """Look a host up; the result is its addresses in digits, as bytes, one a line."""

    @staticmethod
    def add(store: Store, key: str, amount: int) -> StoreCall: ...
    @staticmethod
    def check(store: Store, keys: list[str]) -> StoreCall: ...
    @staticmethod
    def get(store: Store, key: str) -> StoreCall: ...
    @staticmethod
    def set(store: Store, key: str, value: bytes) -> StoreCall: ...
    @staticmethod
    def compare_set(store: Store, key: str, expected: bytes, desired: bytes) -> StoreCall: ...
    @staticmethod
    def delete_key(store: Store, key: str) -> StoreCall: ...
    def wait(self, seconds: float) -> bool:
        """Return whether the call has ended; waits for that at most so long."""

    def result(self) -> Any:
        """Return what the call has returned, once; raises what it has raised."""

def sparse_message(own: Tensor | None, like: Tensor, op: int) -> tuple[Tensor, Tensor]:
    """Return a rank's part of a sparse sum, for two allgathers: of headers and of flat values.

    A header is int64 [sparse_dim, nnz, op, dim, *shape, *indices]. Both are empty without `own`.
    """

def sparse_sum(
    what: str,
    op: int,
    like: Tensor,
    ranks: Sequence[int],
    headers: Tensor,
    lengths: Sequence[int],
    values: Tensor,
    is_coalesced: bool | None,
) -> Tensor:
    """Return the sum of the messages of all ranks, an uncoalesced sparse COO tensor.

    Args:
        what: begins an error's text.
        op: Average, which divides by the number of ranks, or Sum.
        like: a tensor with the shape of the sum.
        ranks: as errors name them.
        headers: of all ranks, one after the other.
        lengths: of the headers, by rank; 0: the rank gives nothing.
        values: of all ranks, one after the other.
        is_coalesced: of the sum; None: as torch finds.

    Raises:
        MismatchError: the shapes or the operators of two ranks differ.
    """

class HostMemory:
    """The memory that the ranks of a host share (csrc/transport/host_memory.h).

    Args:
        fd: the descriptor of `make_memory`, or one that a rank of this host has passed; taken over.
        ranks: the ranks of this host, ascending.
        rank: this process.

    Raises:
        RingError: `fd` is not such memory, or the host has no memory left.
    """

    def __init__(self, fd: int, ranks: Sequence[int], rank: int) -> None: ...
    def reserve_slot(self) -> int:
        """Return the offset of new memory for a process set, in this rank's part.

        Raises:
            RingError: the host has no memory left.
        """

    def release_slot(self, offset: int) -> None:
        """Give such memory back, after all members have ended."""

    def used_bytes(self) -> int:
        """Return the bytes of this rank's part that are allocated."""

    def abandon(self) -> None:
        """In a forked child: let go of the parent's memory. It reads as zeros from then on."""

class ControlPlane:
    """Connections with the other ranks, beside the data (csrc/control/control_plane.h).

    Args:
        rank: this process.
        host_of: host index of every rank.
        labels: every rank's name in messages.
        addresses: by rank, the name of its abstract Unix socket, and a numeric address and a port
            of each network interface, equally many of all ranks.
        key: 32 bytes; all ranks prove that they know them.
        unix_listener: a listening socket, which it duplicates; -1 for none.
        tcp_listeners: likewise, one for each network interface; none on one host.
        heartbeat_timeout_s: silence after which a rank is lost.
        launcher: a pidfd of the process that has started this one, taken over; -1 for none.
        launcher_died: the line for stderr when that has ended; then this process ends, too.
        tls: whether connections over TCP are encrypted. InvalidArgumentError: there is no OpenSSL.
    """

    def __init__(
        self,
        rank: int,
        host_of: Sequence[int],
        labels: Sequence[str],
        addresses: Sequence[tuple[str, Sequence[tuple[str, int]]]],
        key: bytes,
        unix_listener: int,
        tcp_listeners: Sequence[int],
        heartbeat_timeout_s: float,
        launcher: int,
        launcher_died: str,
        tls: bool,
    ) -> None: ...
    def missing(self) -> list[int]:
        """Return the ranks with which a connection is still being made.

        Raises:
            PeerLostError: one of them has exited.
            MismatchError: one of them has another key.
            RingError: this process lacks descriptors.
        """

    def trouble(self) -> str:
        """Return why the last attempt to connect has failed; empty if none has."""

    def fail(self, number: int, why: str) -> None:
        """Tell the other members of a process set that this rank cannot take part in it."""

    def close_set(self, number: int) -> None:
        """Close the data connections of a process set that has ended, and refuse later ones."""

    def leave_unused(self, number: int, members: int, why: str) -> None:
        """Tell the others that this rank has left a set of so many members without using it.

        Close it then, as `close_set` does.
        """

    def has_ended(self, number: int) -> bool:
        """Return whether all its members have left a set, as far as this rank knows by now.

        Then none of them uses its memory any more. Only of a set that this rank has left.
        """

    def lost(self) -> list[int]:
        """Return the ranks that have died or were silent for too long, as far as this one knows."""

    def ask(self, rank: int) -> int:
        """Ask a rank of the world what it does; return the number of the question."""

    def answer(self, rank: int, number: int, text: str) -> None:
        """Answer a rank's question, by 4096 bytes at most: the rest is cut."""

    def want_stop(self, signal: str) -> None:
        """Have all ranks stop at one point of their programs, as this one has got a signal."""

    def pass_point(self) -> bool | None:
        """Pass a point at which the program may stop; return whether all ranks stop there.

        None, without passing it, while that is being agreed.

        Raises:
            PeerLostError: a rank was lost meanwhile.
        """

    def why_stop(self) -> str:
        """Return which rank got which signal first, as this one heard; empty if none did."""

    def read_queries(self, reader: Callable[[bool, int, int, str], None]) -> None:
        """Call `reader` with each query to this rank until stop(), in another thread.

        It gets whether it is a question, from which rank, the question's number, and the
        answer: "" of a question, which is for the operations of this rank.
        """

    def cipher(self) -> str:
        """Return the cipher of control connections between hosts, "AES-128-GCM"; "": none has."""

    def connections(self) -> int:
        """Return how many data connections this rank has made or accepted."""

    def stop(self, patience_s: float, why: str) -> None:
        """Say goodbye until it is heard, or for so long; close all connections. Idempotent.

        `why`: the reason in the other ranks' errors; "": none.
        """

    def abandon(self) -> None:
        """In a forked child, which has closed the inherited connections: forget the plane."""

class LaunchOrder:
    """The order in which a process's sets use its devices (csrc/engine/device.h)."""

    def __init__(self) -> None: ...
    def share(self) -> None:
        """Order them from now on. Call it on all ranks before they agree to make a second set."""

class Timeline:
    """Writes the records of engines into rank 0's file (csrc/timeline/timeline.h).

    Args:
        rank: this process.
        labels: the name of each rank.
        plane: of this process; None in a world of one.
        number: of this timeline in its world, the same on all ranks, never given twice.
        width: sockets of a connection.
        checksums: whether data between hosts carry checksums.
        transfer_timeout_s: after which a connection that stands still has failed.
        has_clock_of_rank_0: whether this process is on rank 0's host.
        path: of the file; only rank 0 uses it.
        mark_cycles: whether rounds of agreement are drawn.
        log: takes a warning.

    Errors: InvalidArgumentError if rank 0 cannot write the file.
    """

    def __init__(
        self,
        *,
        rank: int,
        labels: Sequence[str],
        plane: ControlPlane | None,
        number: int,
        width: int,
        checksums: bool,
        transfer_timeout_s: float,
        has_clock_of_rank_0: bool,
        path: str,
        mark_cycles: bool,
        log: Callable[[str], None],
    ) -> None: ...
    def watch(self, stream: RecordStream) -> None:
        """Take the records of one more engine, which fills the stream."""

    def dropped(self) -> int:
        """Return how many records found no room, once it has stopped."""

    def stop(self, patience_s: float) -> None:
        """Write what is left, and wait so long at most for the other ranks."""

class OperationRecord:
    """One operation of this rank (csrc/engine/recorder.h).

    Times are nanoseconds of ``time.monotonic_ns()``; 0: not yet, or there is no such phase.

    Attributes:
        number: in the order of this rank's submissions to its engine, from 1.
        sequence: in the order in which the ranks of the process set have agreed, from 1, the same
            on all of them; 0: they have not. Of one that they launch: above 2**44, in the order of
            these.
        is_launched: whether the ranks have started it without an agreement (``RunAhead``).
        round: of the exchange in which they agreed; operations of one round were agreed together.
        process_set: the number of its set; 0: the world.
        state: "submitted", "agreed", "started", "finished" or "failed".
        transport: "local", "shm", "tcp", "shm+tcp" or "nccl".
        operation, name, dtype, reduce_op, shape, root: what was asked for. `shape` is without the
            first dimension for allgather and alltoall.
        group: the number of members of its group; 0: in none.
        description: as errors call it.
        bytes: of this rank's input.
        is_inline: its data travelled with the agreement, so it has no `started_ns`.
        is_fused: reduced in one buffer with others, so it has `packed_ns` and `reduced_ns`.
        submitted_ns, agreed_ns, started_ns, packed_ns, reduced_ns, finished_ns: the phases. On a
            device `finished_ns` is when the work was enqueued.
        last_rank: the rank, in the set, that was the last to ask for it; -1: not known. It is known
            with the next agreement of the set, where this rank has waited for a millisecond or
            more.
        lag_ns: how long this rank waited for the others after it had announced the operation.
        error: of a failed operation, else empty.
    """

    number: int
    sequence: int
    is_launched: bool
    round: int
    process_set: int
    state: str
    transport: str
    operation: str
    name: str
    dtype: str
    reduce_op: str
    shape: list[int]
    root: int
    group: int
    description: str
    bytes: int
    is_inline: bool
    is_fused: bool
    submitted_ns: int
    agreed_ns: int
    started_ns: int
    packed_ns: int
    reduced_ns: int
    finished_ns: int
    last_rank: int
    lag_ns: int
    error: str

class MessageRecord:
    """One message of this rank (csrc/messages/message_request.h).

    Times are nanoseconds of ``time.monotonic_ns()``; 0: not yet, or there is no such phase.

    Attributes:
        number: in the order of this rank's sends and receives in the set, from 1.
        state: "posted", "matched", "finished" or "failed".
        is_send: whether this rank sends it.
        peer: the other rank of the set; -1: a receive from any that has no message yet.
        tag: the caller's.
        dtype: torch's name of it.
        bytes: of the message; of a receive that has none yet, the most that it takes.
        description: "receive of float32, 16 bytes, tag 3".
        posted_ns: this rank asked for it.
        matched_ns: a receive knows its message, a long send its receive. A short send has none.
        finished_ns: the end, also of one that failed.
        error: of a failed one; "" otherwise.
    """

    number: int
    state: str
    is_send: bool
    peer: int
    tag: int
    dtype: str
    bytes: int
    description: str
    posted_ns: int
    matched_ns: int
    finished_ns: int
    error: str

class RecordStream:
    """The records of all operations of one engine that end, for one reader.

    ``Engine.observe(stream)`` fills it. The engine never waits for the reader: what finds no room
    is dropped and counted.

    Args:
        capacity: of records that nobody has taken yet; about 300 bytes each.
    """

    def __init__(self, capacity: int) -> None: ...
    def take(self, most: int) -> list[OperationRecord]:
        """Remove the oldest records, at most so many. Never waits. One thread at a time."""

    @property
    def dropped(self) -> int:
        """The number of records that found no room so far."""

class _Options(TypedDict, total=False):
    """The options of `Engine.submit`.

    Attributes:
        root: the rank, in the set, of a broadcast, reduce, gather or scatter.
        splits: of an alltoall, the rows for each rank, in total at most those of the tensor.
        joinable: ranks that have joined give an allgather no rows; otherwise they are an error.
    """

    root: int
    splits: Sequence[int]
    joinable: bool

class Engine:
    """Runs the collectives of a process set.

    Args:
        rank: this process in the set.
        members: rank in the world, by rank in the set.
        host_of: host index of every member, hosts numbered in order of their first member.
        labels: every member's name in messages, "rank 2 (10.0.0.7, pid 4711)".
        may_spin: whether every member on this kernel has a core of its own.
        plane: of this process; None for a set of one.
        number: the set's, the same on all ranks, never given twice.
        memory: of this host; None if no host has several members.
        slots: by member, the offset of the set's memory in the member's part.
        launch_order: of this process, for all of its sets.
        config: the settings, of which it reads those of csrc/core/config.h.
        ucx_library: as of ``ucx_found``, to send data between hosts over UCX; None: over TCP.
        nccl_blocking: whether NCCL_COMM_BLOCKING is set, an error at the first tensor on a GPU.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        host_of: Sequence[int],
        labels: Sequence[str],
        may_spin: bool,
        plane: ControlPlane | None,
        number: int,
        memory: HostMemory | None,
        slots: Sequence[int],
        launch_order: LaunchOrder,
        config: Config,
        *,
        ucx_library: str | None,
        nccl_blocking: bool,
        log: Callable[[str], None],
    ) -> None: ...
    def submit(
        self,
        collective: str,
        tensor: Tensor | None = None,
        output: Tensor | None = None,
        name: str | None = None,
        blocking: bool = False,
        op: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
        **options: Unpack[_Options],
    ) -> Work:
        """Submit a collective.

        Args:
            collective: its name in csrc/engine/collectives.inc; a join is submitted by ``join()``.
            tensor: of this rank. In a scatter, the root's of shape (size, *output.shape); on the
                other ranks it is ignored. None: of a barrier or a fence.
            output: None: a new tensor; it may be `tensor` if it has its shape. That of an
                allgather or alltoall is always new; that of a reducescatter is contiguous and has
                this rank's rows, of which the first ranks get one more; a gather's has the shape
                (size, *tensor.shape); a scatter must have one. Of a reduce or gather it is
                ignored on all ranks but the root, and the result of the work is None there.
            name: matches the request between the ranks; None: a number. A barrier without a name
                lets later requests be numbered anew; a fence is one of the numbered requests, at
                its place in their order.
            blocking: the caller is about to wait, so no thread is woken.
            op: of an allreduce, reduce or reducescatter, a ReduceOp; by default Sum.
            prescale: multiplies each rank's tensor before the reduction.
            postscale: multiplies the result.
            options: of this collective.

        Raises:
            InvalidArgumentError: an argument is wrong on this rank; nothing was submitted.
        """

    def submit_group(
        self,
        collective: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        name: str | None = None,
        blocking: bool = False,
        op: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
        **options: Unpack[_Options],
    ) -> list[Work]:
        """Submit all or none, as `submit`. Member i of group "g" has the name "g.i"."""

    def run(
        self,
        collective: str,
        tensor: Tensor | None = None,
        output: Tensor | None = None,
        name: str | None = None,
        root: int = -1,
        op: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        /,
    ) -> Tensor:
        """Submit a collective, wait, and return the result (``submit``): in the least time.

        Writes into `tensor` itself count for autograd. An alltoall sends equally many rows to each
        rank, which divide its rows.
        """

    def join(self) -> Work:
        """Submit. The result is an int64 scalar: the last rank that has joined."""

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Message:
        """Begin to send a tensor to another rank of the set (csrc/messages/point_to_point.h).

        Nobody may write to the tensor, which is on the CPU, until the message is done. That does
        not say that it has been received. One of up to 16 KiB waits for nobody.

        Raises:
            InvalidArgumentError: there is no such other rank, or the tensor cannot be sent.
            RingError: what has ended the messages of the set, of the type that it has everywhere.
        """

    def receive(self, tensor: Tensor, source: int | None, tag: int = 0) -> Message:
        """Begin to receive into a tensor: the next message with `tag`, of one rank or of any.

        A message may be shorter. One that is longer, or of another dtype, is a MismatchError.
        Raises as `send`.
        """

    def end(self, why: str) -> NoReturn:
        """End the job on all ranks, and raise RingError."""

    def empty_shared(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Return an uninitialised tensor whose allreduce in place copies nothing.

        It is an ordinary tensor where there is no shared memory (one rank, TCP only), or no room
        in it, which is logged once.
        """

    def gradient_blocks(self) -> BlockPool | None:
        """Return the memory of large gradients; None if they lie in buckets like all others."""

    def vacant_gradient_bytes(self) -> int:
        """Return the bytes of that memory which wait for the next gradients."""

    def records(self) -> list[OperationRecord]:
        """Return the last 2000 operations, oldest first, also those in flight."""

    def totals(self) -> dict[str, Any]:
        """Return sums over all operations that have ended: torch_ring.tracing.counters()."""

    def messages(self) -> list[MessageRecord]:
        """Return the last 2000 messages, oldest first, also those on their way."""

    def message_totals(self) -> dict[str, Any]:
        """Return sums over all messages that have ended: torch_ring.tracing.counters()."""

    def observe(self, stream: RecordStream | None) -> None:
        """Send the record of each operation that ends from now on to `stream`; None: to nobody."""

    def has_shared_memory(self) -> bool: ...
    def overlaps(self) -> bool:
        """Whether reducing during backward can pay, because data crosses a network."""

    def shutdown(self, removed: bool = False, why: str = "") -> None:
        """Stop the thread, free everything. Idempotent.

        `removed`: all members do it at once; otherwise they are told that this one leaves, and
        `why`, in at most 1000 characters.
        """

    def abandon(self) -> None:
        """In a forked child: let go of the parent's engine, without touching it."""

class Work:
    """The pending result of a submitted collective."""

    def done(self) -> bool: ...
    def wait(self, waited: Work | None = None) -> Tensor:
        """Block (interruptible, GIL released) and return the output tensor, or raise its error.

        On a device the current stream waits for the output. `waited`: another work for which that
        stream waits already.
        """

    def received_splits(self) -> list[int]:
        """Return the rows received from each rank by an allgather or alltoall."""

class Message:
    """A message on its way. One that has waited for longer than the timeout ends the set."""

    def done(self) -> bool: ...
    def wait(self) -> int:
        """Block (interruptible, GIL released); return the other rank: a receive's source.

        Raises:
            MismatchError: the message is longer than the receive, or of another dtype.
            PeerLostError: the other rank has left, or a rank of the set is lost.
            TimeoutError: the other rank is late (TORCH_RING_TIMEOUT).
            RingError: torch_ring was shut down.
        """

class _Membership(Protocol):
    """The methods of a group that RingBackend calls (torch_ring/c10d/groups.py)."""

    def connect(self) -> Engine:
        """Return the group's engine.

        It is called once, when the group is first used, by any thread, and may block. Its error is
        that of the operation, and it is called again.
        """

    def leave(self, why: str) -> None:
        """Leave the group. It is called when the group ends, and may be called again.

        `why`: the reason for the other ranks, unless an exception is being handled; "": none.
        """

    def handle(self) -> str:
        """Return what other ranks need to know for `reconfigure`."""

    def reconfigure(
        self, uuid: int, handles: list[str] | set[str], timeout_s: float
    ) -> tuple[int, int]:
        """Leave the ranks, and make a new group of those with the handles; a list says their order.

        Return the rank and the size.
        """

class RingBackend(Backend):
    """torch.distributed's backend of one group (csrc/c10d/ring_backend.h).

    Args:
        rank, size: of this process in the group, and of the group.
        group: this process's part in it.
        split: returns the backend of some ranks, this one included: of their store, the ranks in
            their order, and a timeout in seconds.
        store: of this group alone.
        timeout_s: seconds; of the operations, as the engine has it.

    Attributes:
        group: as above.
    """

    group: Any

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        group: _Membership,
        split: Callable[[Store, list[int], float], RingBackend],
        store: Store,
        timeout_s: float,
    ) -> None: ...

class Launch:
    """A reduction on a device that was launched without an agreement."""

    def done(self) -> bool: ...
    def wait(self) -> Tensor:
        """Make the current stream wait for the result, not the host, and return the tensor."""

class BlockPool:
    """Blocks of shared memory for large gradients (csrc/memory/block_pool.h)."""

class PlannedBucket:
    """One bucket of a plan (csrc/gradients/run_ahead.h)."""

    def __init__(
        self,
        hooks: GradientHooks,
        bucket: int,
        runs: Sequence[tuple[int, int]],
        memory: Tensor,
        cast: bool,
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        """Take a bucket of `hooks`, and (begin, end) of what is sent of it, in elements.

        `memory` has the size, dtype and device of what is sent; with `cast` it is sent itself.
        """

def launch_allreduce(
    engine: Engine, tensor: Tensor, op: int, prescale: float, postscale: float
) -> Launch:
    """Reduce a tensor on a device in place, at once, without an agreement (`Engine::launch`).

    All ranks launch the same tensors in the same order; the device has reduced something by
    `Engine.allreduce` before. Neither this rank's host nor another one waits. The reduction comes
    after what is on the current stream.

    Raises:
        InvalidArgumentError: the tensor is not on a device, or cannot be reduced so.
        RingError: nothing was reduced on the device before; the fatal cause.
    """

class PromisedLaunches:
    """Collectives that the ranks agree upon in advance (csrc/gradients/promised_launches.h)."""

    def __init__(self, engine: Engine) -> None: ...
    def begin(
        self, promised: Sequence[tuple[bool, int, bool]], like: Tensor, in_backward: bool
    ) -> None:
        """Begin a series on the device of `like`, and watch this rank's other requests.

        `promised`: for each collective, whether it is an allgather (else a sum), its number of
        elements, and whether they are float64 (else float32). None: the series is not promised.
        """

    def is_interrupted(self) -> bool:
        """Return whether this rank has requested anything else since `begin`."""

    def launch(self, tensor: Tensor, gathers: bool) -> Launch | None:
        """Launch the next promised collective; None: it is another one, or there is none left."""

    def end(self) -> int:
        """Launch NaN for what is left of the promise; return the number of its collectives."""

    def place(self) -> int:
        """Return the number of launches so far; -1: a request is not on the device yet."""

class RunAhead:
    """Launches the buckets of planned backward passes (csrc/gradients/run_ahead.h).

    A process set has one: `Engine.join` answers the other ranks by it.
    """

    def __init__(self, engine: Engine) -> None: ...
    def set_plan(self, buckets: Sequence[PlannedBucket]) -> None:
        """Take a plan, of no bucket if the next passes are not planned."""

    def open(self) -> None:
        """Begin a pass: its buckets are launched when they are full."""

    def has_launched(self) -> bool:
        """Return whether a bucket has been launched in this pass."""

    def launch_rest(self) -> None:
        """Launch what is left of the pass."""

    def wait(self) -> None:
        """Make the current stream wait for the pass; write the results into the buckets."""

class Due:
    """The gradients that `GradientHooks.pending` calls due."""

    now: Due
    """Those after backward_passes_per_step passes, outside of no_sync()."""
    begun: Due
    """All outside of no_sync(), due or not."""
    everything: Due
    """All; also those that were assigned or written by hand."""

class Worst:
    """The worst of some floating-point numbers; a later one is worse."""

    finite: Worst
    large: Worst
    """A magnitude above a limit."""

    infinite: Worst
    nan: Worst
    value: int
    def __init__(self, value: int) -> None: ...

class NotFinite:
    """A gradient of one rank with a number that is not finite, or too large to be sent.

    Attributes:
        parameter: the index of the parameter.
        rank: the rank in the world.
        worst: the worst of the gradient's numbers.
        carries: whether it has an averaged part, which may be the cause.
    """

    parameter: int
    rank: int
    worst: Worst
    carries: bool
    def __init__(self, parameter: int, rank: int, worst: Worst, carries: bool) -> None: ...

class GradientReport:
    """The gradients of one optimizer on one rank (csrc/gradients/report.h)."""

    def __init__(
        self,
        optimizer: int,
        due: int = 0,
        *,
        sparse: int = 0,
        accumulating: bool = False,
        incomplete: bool = False,
        stepping: bool = False,
        late: bool = False,
        carried: int = 0,
        unsure: int = 0,
        order: Sequence[int] = (),
        digest: bytes = b"",
        not_finite: Sequence[NotFinite] = (),
    ) -> None: ...
    @property
    def optimizer(self) -> int: ...
    @property
    def due(self) -> int: ...
    @property
    def is_due(self) -> bool:
        """Whether there are gradients to reduce now."""

    @property
    def sparse(self) -> int: ...
    @property
    def carried(self) -> int: ...
    @property
    def unsure(self) -> int: ...
    @property
    def accumulating(self) -> bool: ...
    @property
    def stepping(self) -> bool: ...
    @property
    def digest(self) -> bytes: ...
    def with_digest(self, digest: bytes) -> GradientReport:
        """Return a copy with a digest of the weights, of 8 bytes."""

class PassReport:
    """A rank's message at the end of a backward pass, or before a step (csrc/gradients/report.h).

    Read-only.

    Attributes:
        steps: the total number of steps of its optimizers.
        gradients: the report of each optimizer that has gradients.
        gave_up: whether the pass before has failed on this rank, and its program has gone on.
        plan: the digest of the plan of a planned pass.
        is_of_step: whether the rank is about to step, rather than at the end of a pass.
        due: the parameters to reduce now, by optimizer; optimizers without any are left out.
    """

    steps: int
    gradients: list[GradientReport]
    gave_up: bool
    plan: int
    is_of_step: bool
    due: dict[int, int]
    def __init__(
        self,
        steps: int,
        gradients: Sequence[GradientReport] = (),
        *,
        gave_up: bool = False,
        plan: int = 0,
    ) -> None: ...
    def encode(self) -> bytes:
        """Return the bytes that `decode_all` decodes."""

    @staticmethod
    def decode_all(encoded: bytes) -> list[PassReport]:
        """Return the reports of all ranks, which follow one another."""

class Reduction:
    """The gradients of one optimizer that all ranks reduce now (csrc/gradients/decide.h)."""

    optimizer: int
    touched: int
    sparse: int
    carried: int
    unlike: int
    order: list[int]
    not_finite: list[NotFinite]

class PassDecision:
    """The common end of a backward pass, or beginning of a step (csrc/gradients/decide.h).

    Attributes:
        given_up: whether some ranks have given up the pass before, and not all.
        out_of_step: the first report of another step than the first one, if any.
        reductions: what they reduce, in the order of optimizers.
        is_of_step: whether all ranks are about to step.
        is_whole: whether no rank has joined.
        has_digests: whether some reports have digests of weights.
        has_another_round: whether the ranks report once more, as soon as this is reduced.
        mentioned: the optimizers that a rank uses.
        open: those with gradients that a later round or pass reduces.
        incomplete: those with parameters that have no averaged gradient yet.
    """

    given_up: bool
    out_of_step: int | None
    reductions: list[Reduction]
    is_of_step: bool
    is_whole: bool
    has_digests: bool
    has_another_round: bool
    mentioned: set[int]
    open: set[int]
    incomplete: set[int]

def decide(reports: Sequence[PassReport], size: int, parameters: Mapping[int, int]) -> PassDecision:
    """Decide by the reports alone, so that all ranks decide alike.

    Args:
        reports: of the ranks that have not joined.
        size: the number of all ranks.
        parameters: the numbers of parameters, by optimizer.

    Raises:
        RingError: there is no report.
    """

class Pending:
    """The gradients that this rank has accumulated and not yet reduced.

    Attributes:
        due: the parameters to reduce now.
        sparse: those of them whose gradient is sparse.
        carried: those, due or not, with an averaged part, which is not sent.
        unsure: those of them whose averaged part may not be that of other ranks.
        accumulating: whether there are others, not due yet.
        complete: whether each parameter is due, or was reduced since the step began.
        late: whether some gradients have come after their buckets had been sent.
        unready: whether refuse_others_pass() and, if parameters_moved(), set_buckets() must come
            first.
        any: whether there are any gradients.
    """

    due: int
    sparse: int
    carried: int
    unsure: int
    accumulating: bool
    complete: bool
    late: bool
    unready: bool
    any: bool

class GradientHooks:
    """Moves gradients into buckets as autograd produces them (csrc/gradients/gradient_hooks.h).

    A set of parameters is an int, of which bit i is parameter i.

    Args:
        parameters: leaves; hooked whether they require grad now or not.
        names: their names in errors.
        on_backward_end: called at the end of each backward pass with a gradient; its exception
            comes out of backward().
        on_bucket_full: called during the pass with each bucket that has all its gradients.
        new_memory: returns other memory for a bucket, whose gradients the program keeps.
        fail: called if two backward passes get in each other's way; ends the job, and raises.
        agreement: of the process set.
        run_ahead: of the process set; None: no pass will be planned.
        blocks: memory of gradients that fill a bucket alone.
        sums: whether op=Sum.
        largest: the largest magnitude that `not_finite` takes for finite; None: it finds nothing.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        *,
        on_backward_end: Callable[[], None],
        on_bucket_full: Callable[[int], None],
        new_memory: Callable[[int], Tensor],
        fail: Callable[[str], None],
        blocks: BlockPool | None,
        agreement: PassAgreement,
        run_ahead: RunAhead | None,
        sums: bool,
        largest: float | None,
    ) -> None: ...
    def set_buckets(
        self, buckets: Sequence[Tensor], slots: Sequence[tuple[int, int]], early: Sequence[bool]
    ) -> None:
        """Give every parameter its view (bucket, offset in elements); gradients move there.

        An empty tensor stands for a bucket of one gradient that lies in a block.
        `early`: by bucket, whether `on_bucket_full` is called for it.
        """

    def pending(self, which: Due, stepping: GradientHooks | None = None) -> Pending: ...
    def report(
        self, pending: Pending, optimizer: int, *, is_stepping: bool, orders: bool, rank: int
    ) -> GradientReport:
        """Return the report of these gradients, without a digest of weights.

        Args:
            pending: the gradients.
            optimizer: the index of the optimizer.
            is_stepping: whether it is about to step.
            orders: whether the report has the order in which the gradients became ready.
            rank: this one.
        """

    @staticmethod
    def worst_numbers(gradients: list[Tensor]) -> list[Worst]:
        """Return the worst number of each gradient."""

    def set_by_hand(self) -> list[int]:
        """Return the parameters whose gradient the program has set, and nothing has reduced."""

    def set_elsewhere(self, slots: dict[int, tuple[GradientHooks, int]]) -> None:
        """Give these parameters' slots to other hooks, as the parameters of these indices there."""

    def leave(self) -> None:
        """Serve only other optimizers' slots: this one's is gone. Never waits."""

    def refuse_others_pass(self) -> None:
        """Call `fail` if another thread's pass runs now, or if one has failed in the middle."""

    def parameters_moved(self) -> bool:
        """Return whether a parameter is on another device than its bucket."""

    def require_unchanged(self, touched: int) -> None:
        """Call `fail` if the program has changed one of these so that its sum is unknown."""

    def carry(self, carried: int) -> None:
        """Take the averaged parts of these gradients out: they are not sent."""

    def drop_averaged(self, dropped: int) -> None:
        """Drop the averaged parts of these gradients."""

    def carried_part(self, index: int) -> Tensor:
        """Return the part that `carry` has taken out, flat, to be averaged in place; or zeros."""

    def sparse_carried(self, index: int) -> Tensor | None:
        """Return that part of a sparse gradient, if any."""

    def set_sparse_carried(self, index: int, part: Tensor) -> None: ...
    def move_into_buckets(self, touched: int, scale: float) -> None:
        """Prepare gradients to be reduced: they move into buckets; missing ones become zero.

        `scale` multiplies an averaged gradient that is sent again.
        """

    def memory(self, bucket: int) -> Tensor:
        """Return a bucket's memory, after all its gradients have arrived or been moved there."""

    def expect(self, planned: int | None) -> None:
        """Plan the next passes, which reduce these gradients; None: the ranks agree on them."""

    def fill(self, planned: int, due: int, scale: float) -> int:
        """Move planned gradients into buckets; remember those that are not due as they were.

        Returns those with an averaged part; `scale`: see `move_into_buckets`.
        """

    def restore(self, nowhere: int) -> None:
        """Give gradients back as they were before fill(), and forget the others."""

    def take_up_late(self) -> None:
        """Add the gradients that came after their bucket was sent to `grad`, where they are due."""

    def bucket_view(self, index: int) -> Tensor:
        """Return a new tensor over a parameter's part of a bucket."""

    def local_gradient(self, index: int, scale: float) -> Tensor | None:
        """Return a parameter's gradient, to be reduced outside the buckets; see `carry`."""

    def set_sparse_result(self, index: int, gradient: Tensor) -> None:
        """Make a sparse tensor the reduced gradient of a parameter."""

    def mark_reduced(self, touched: int) -> None:
        """Record that these gradients have been reduced."""

    def compiled_together(self) -> list[int]:
        """Return the parameters whose gradients one compiled graph computes in this pass.

        Of several graphs, that with the most; none outside of a pass.
        """

    def reset(self, *, gradients: bool) -> None:
        """Begin the next step; with `gradients`, also forget accumulated gradients."""

    def doubt_averages(self) -> None:
        """Take the averaged parts of gradients for ones that may not be those of other ranks."""

    def has_failed(self) -> bool:
        """Return whether a failed pass has left gradients that are not reduced."""

    def restart_passes(self) -> None:
        """Count passes from zero again."""

    def set_passes_per_step(self, passes: int) -> None: ...
    def set_synchronizing(self, synchronizing: bool) -> None:
        """With False, no gradient is due."""

    def disable(self) -> None:
        """Stop the hooks for good, in a forked child."""

class PassAgreement:
    """The agreements of a process set's optimizers (csrc/gradients/pass_agreement.h)."""

    number: int
    """Of the next agreement, or of the one under way; read-only."""

    is_open: bool
    """Whether an agreement is under way; read-only."""

    open_report: PassReport | None
    """The report of the agreement under way; read-only."""

    is_reducing: bool
    """Whether gradients are being reduced, or an interrupt has ended that; read-only."""

    failure: str
    """The error of a pass that this rank has given up since the last agreement; read-only."""

    has_sent_in_vain: bool
    """Whether gradients of such a pass have been sent; read-only."""

    def __init__(self) -> None: ...
    def begin_reduction(self) -> None:
        """Record that the ranks begin to reduce what they have agreed on."""

    def finish(self) -> None:
        """Record that the gradients are reduced."""

    def restart(self, number: int) -> None:
        """Drop what is under way; the next agreement has this number."""

    def begin_ending(self, *, of_step: bool) -> bool:
        """Take the end of a pass, or a step, for this thread; return whether no other has it."""

    def stop_ending(self) -> None: ...

class PlainReduction:
    """Reduces an optimizer's gradients in C++ (csrc/gradients/end_pass.h).

    Args:
        hooks: of the optimizer.
        optimizer: its index on the process set.
        buckets: the parameters of each bucket, as a bitmap; 0 for one without elements.
        op, prescale, postscale: of the allreduces.
        rescale: multiplies an averaged gradient that is sent again.
    """

    def __init__(
        self,
        hooks: GradientHooks,
        optimizer: int,
        buckets: Sequence[int],
        op: int,
        prescale: float,
        postscale: float,
        rescale: float,
    ) -> None: ...

class PassEnd:
    """The common end of a backward pass, or beginning of a step (csrc/gradients/end_pass.h).

    Attributes:
        reports: of all ranks that have not joined, in their order.
        own: the gradients that are due in this rank's report, as a bitmap by optimizer.
        decision: what the reports mean.
        is_reduced: whether the agreement has finished; else the caller reduces.
        is_complete: whether it has, and no rank has anything left to reduce before a step.
    """

    reports: list[PassReport]
    own: dict[int, int]
    decision: PassDecision
    is_reduced: bool
    is_complete: bool

    def __init__(self) -> None: ...
    def run(
        self,
        engine: Engine,
        agreement: PassAgreement,
        report: PassReport,
        parameters: Mapping[int, int],
        plain: Sequence[PlainReduction],
    ) -> None:
        """Send this rank's report, decide, and reduce the gradients if `plain` takes all of them.

        If an interrupted call has sent a report, that one counts and not this.

        Args:
            engine: of the process set.
            agreement: the present one.
            report: this rank's.
            parameters: their numbers, by optimizer.
            plain: reductions that need no Python.
        """

    def run_plain(
        self,
        engine: Engine,
        agreement: PassAgreement,
        rank: int,
        steps: int,
        plain: Sequence[PlainReduction],
    ) -> bool:
        """Do the same at the end of a pass, with the reports of all optimizers, which are these.

        Args:
            engine: of the process set.
            agreement: the present one, for which no report is on its way.
            rank: this one.
            steps: of all optimizers.
            plain: the reductions of all optimizers.

        Returns:
            Whether a gradient is due, and all are ready; otherwise nothing was sent.
        """

    def raise_interrupt(self) -> None:
        """Raise the exception of a signal handler that came during the reduction, if any."""

def backward_name(number: int, /) -> str:
    """Return the name of the allgather of reports at the end of a backward pass.

    `number` counts the agreements of the process set. C++ and Python use the same name
    (csrc/engine/request.h).
    """

def bucket_name(optimizer: int, number: int, bucket: int, begin: int, /) -> str:
    """Return the name of the allreduce of a bucket, or of its part from element `begin` on."""

def in_words(name: str, /) -> str | None:
    """Return what an operation of backward synchronisation is for, by its name; None for others."""

def all_sent(gathered: bytes, own: bytes, /) -> bool:
    """Return whether `gathered` is `own`, once or repeated: all ranks have sent the same bytes."""
