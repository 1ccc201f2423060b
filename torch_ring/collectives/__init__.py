"""Collective operations on tensors, one module for each.

Every rank of the process set calls the same operations. Operations with a name may be submitted in
any order; those without are numbered, so their order must be the same on all ranks. Tensors are
dense, on the CPU or on a GPU.

broadcast, allgather and alltoall move every dtype of numbers: uint8 to uint64, int8 to int64,
float16, bfloat16, float32, float64, the float8 kinds, complex32, complex64, complex128, and bool.
allreduce and reducescatter compute with uint8, int8, int16, int32, int64, float16, bfloat16,
float32 and float64; Sum and Average also with complex64 and complex128; Min, Max and Product also
with bool; Band, Bor and Bxor with integers and bool alone.

Raised by all of them, on every rank:

* :class:`NotInitializedError` before :func:`torch_ring.init`;
* ``ValueError`` for an argument that is wrong on this rank, before anything is sent;
* :class:`MismatchError` when the ranks call different operations, or some have called
  :func:`join` and the operation needs them; the job may go on;
* :class:`PeerLostError` when a rank is gone or silent, :class:`TimeoutError` when one is late.

Open first: `allreduce`, which the other modules follow; `handle` is the pending result.
"""
