"""The native module: engine, communicators and gradient hooks (csrc/bindings)."""

from collections.abc import Callable, Sequence

from torch import Tensor

BUILT_FOR_TORCH: str
"""The torch version that the module was compiled against."""

def make_memory() -> int:
    """Return a new memfd for a rank's shared memory (grown by the engine). Errors: OSError."""

def make_doorbell() -> int:
    """Return a new eventfd."""

def nccl_version(library: str) -> int:
    """Return the version of NCCL at that path (empty: torch's, or the system's): 22703 is 2.27.3.

    Errors: InvalidArgumentError if there is none, or it is too old.
    """

def lane_peers(rank: int, host_of: Sequence[int]) -> list[int]:
    """Return the ranks with which `rank` needs a data connection: the same lane of other hosts."""

def empty_result(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised contiguous tensor with the dtype and device of `like`.

    On the CPU, from 4 MiB on, it lies in pages that are kept for the next when it goes.
    """

def empty_result_like(like: Tensor) -> Tensor:
    """Return the same in the shape and layout of `like`; it requires no gradient."""

def keep_results(most_bytes: int) -> None:
    """Keep at most so many bytes of results' pages in this process; none before the first call."""

def kept_result_bytes() -> int:
    """Return how many are kept at present."""

class Engine:
    """Runs the collectives of one world. Takes ownership of every descriptor that it is given.

    Args:
        rank, size: this process.
        host_of: host index of every rank, hosts numbered in order of their first rank.
        labels: what to call every rank in messages, "rank 2 (10.0.0.7, pid 4711)".
        may_spin: whether every rank of this host has a core of its own.
        data: per rank, connected authenticated sockets, in the same order at both ends; none where
            `lane_peers` does not ask for them.
        memory, doorbells: per rank of this host (self included) its memfd and eventfd; else -1.
        control: per rank a connected authenticated socket for the watchdog; -1 for self.
        timeout_s ...: see torch_ring.config.
        nccl_blocking: whether NCCL_COMM_BLOCKING is set, an error at the first tensor on a GPU.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host_of: Sequence[int],
        labels: Sequence[str],
        may_spin: bool,
        data: Sequence[Sequence[int]],
        memory: Sequence[int],
        doorbells: Sequence[int],
        control: Sequence[int],
        *,
        timeout_s: float,
        heartbeat_timeout_s: float,
        stall_warning_s: float,
        fusion_window_s: float,
        fusion_threshold_bytes: int,
        nccl_library: str,
        nccl_blocking: bool,
        log: Callable[[str], None],
    ) -> None: ...
    def allreduce(
        self,
        tensor: Tensor,
        output: Tensor,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
    ) -> Work:
        """Submit. `output` may be `tensor`. An empty name is numbered.

        `blocking` (here and below): the caller is about to wait, so that no thread is woken.
        """

    def allreduce_and_wait(
        self,
        tensor: Tensor,
        output: Tensor | None,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        /,
    ) -> Tensor:
        """Return `output`, or a new tensor: the shortest way of a small tensor, with no work.

        In place, it tells autograd.
        """

    def broadcast(
        self, tensor: Tensor, output: Tensor, root: int, name: str, blocking: bool = False
    ) -> Work: ...
    def allgather(
        self, tensor: Tensor, name: str, blocking: bool = False, joinable: bool = False
    ) -> Work:
        """Submit. With `joinable`, ranks that have joined give no rows; otherwise it fails then."""

    def alltoall(
        self, tensor: Tensor, splits: Sequence[int], name: str, blocking: bool = False
    ) -> Work:
        """Submit. `splits`: rows for each rank, together at most those of the tensor."""

    def reducescatter(
        self,
        tensor: Tensor,
        output: Tensor,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
    ) -> Work:
        """Submit. `output` is contiguous and has this rank's rows: the first ranks get one more."""

    def barrier(self, name: str, blocking: bool = False) -> Work:
        """Submit. Without a name: the caller waits, and requests are numbered anew after it."""

    def join(self) -> Work:
        """Submit. The result is an int64 scalar: the last rank that has joined."""

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
    ) -> list[Work]:
        """Submit all or none (here and below). Member i of group "g" has the name "g.i"."""

    def grouped_allgather(
        self, tensors: Sequence[Tensor], name: str, blocking: bool = False
    ) -> list[Work]: ...
    def grouped_reducescatter(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        blocking: bool = False,
    ) -> list[Work]: ...
    def finalize_dense(
        self, finalizer: DenseFinalizer, entry: bytes, number: int, /
    ) -> bytes | None:
        """End a backward pass if all gradients are due here, and the ranks all say `entry`.

        Returns:
            None if not all are due, and nothing was sent; the ranks' entries, one after the other,
            if they differ, and nothing was reduced; nothing, b"", if all is done.
        """

    def empty_shared(self, shape: Sequence[int], dtype: object) -> Tensor:
        """Return an uninitialised tensor whose allreduce in place copies nothing.

        An ordinary tensor where there is no shared memory (one rank, TCP only).
        """

    def gradient_blocks(self) -> BlockPool | None:
        """Return the memory of large gradients; None if they lie in buckets as all others."""

    def has_shared_memory(self) -> bool: ...
    def overlaps(self) -> bool:
        """Whether reducing during backward can pay: some of the way is a network."""

    def shutdown(self) -> None:
        """Say goodbye, stop the threads, free everything. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors, touch nothing else."""

class Work:
    """The pending result of a submitted collective."""

    def done(self) -> bool: ...
    def wait(self) -> Tensor:
        """Block (interruptible, GIL released) and return the output tensor, or raise its error."""

    def received_splits(self) -> list[int]:
        """Return how many rows of the result came from each rank, of an allgather or alltoall."""

class BlockPool:
    """Shared memory for tensors that come and go (csrc/memory/block_pool.h)."""

class GradientHooks:
    """Moves gradients into buckets as autograd produces them (csrc/bindings/gradient_hooks.h).

    In a bitmap, parameter i is bit i % 8 of byte i / 8.

    Args:
        parameters: leaves; hooked whether they require grad now or not.
        names: what errors call them.
        reduced_scale: multiplies an already reduced gradient before autograd accumulates into it.
        on_backward_end: called at the end of each backward pass that touched a parameter; its
            exception comes out of backward().
        on_bucket_full: called during the pass with a bucket all of which is due.
        blocks: where gradients that fill a bucket alone lie.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        *,
        reduced_scale: float,
        on_backward_end: Callable[[], None],
        on_bucket_full: Callable[[int], None],
        blocks: BlockPool | None,
    ) -> None: ...
    def set_buckets(
        self, buckets: Sequence[Tensor], slots: Sequence[tuple[int, int]], early: Sequence[bool]
    ) -> None:
        """Give every parameter its view: (bucket, offset in elements); gradients move there.

        A bucket that is an empty tensor of its dtype has one gradient, which lies in a block.
        `early`: by bucket, whether `on_bucket_full` is called for it.
        """

    def pending(self, everything: bool) -> tuple[bytes, bytes, bool]:
        """Return the bitmap of what is due, of what is sparse of it, and whether more accumulates."""

    def move_into_buckets(self, touched: bytes) -> None:
        """Prepare the parameters of the bitmap to be reduced: gradients move, or become zero."""

    def memory(self, bucket: int) -> Tensor:
        """Return the memory to reduce, when all of a bucket has arrived or been moved into it."""

    def local_gradient(self, index: int) -> Tensor | None:
        """Return the gradient of a parameter that is to be reduced outside the buckets."""

    def set_sparse_result(self, index: int, gradient: Tensor) -> None:
        """Make a sparse tensor the reduced gradient of a parameter."""

    def mark_reduced(self, touched: bytes) -> None:
        """Record that the parameters of the bitmap have been reduced."""

    def ready_order(self) -> list[int]:
        """Return the parameters in the order of their arrival in the current pass."""

    def reset(self, *, gradients: bool) -> None:
        """Count passes from zero; with `gradients`, forget what was accumulated."""

    def set_passes_per_step(self, passes: int) -> None: ...
    def set_synchronizing(self, synchronizing: bool) -> None:
        """With False, nothing is ever due."""

    def disable(self) -> None:
        """Make the hooks do nothing any more."""

class DenseFinalizer:
    """All gradients of an optimizer, as `Engine.finalize_dense` reduces them.

    `everything` is the bitmap of all parameters. A bucket is its index, and the text before and
    after a pass's number in its name.
    """

    def __init__(
        self,
        hooks: GradientHooks,
        everything: bytes,
        buckets: Sequence[tuple[int, str, str]],
        op: int,
        prescale: float,
        postscale: float,
        /,
    ) -> None: ...
