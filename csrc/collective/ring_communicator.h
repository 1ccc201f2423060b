// SPDX-License-Identifier: Apache-2.0
// RingCommunicator: collectives over connections, around a ring or in log2(n) steps.
#pragma once

#include <memory>
#include <vector>

#include "collective/communicator.h"
#include "collective/plan.h"
#include "collective/tcp_board.h"
#include "core/at.h"
#include "transport/connection.h"

namespace torch_ring {

/// Data goes around a ring, or across it in few steps: choice.h chooses by bytes and ranks, the
/// same on every rank. In a ring each rank sends to the next and receives from the previous one at
/// the same time. Bruck's algorithms take ceil(log2(n)) steps at distances 1, 2, 4, ...
/// (BruckStep). A reduction exchanges inputs, all at once among up to kSectionRanks, and adds them
/// in an order that depends on n alone (sections_of()): up to kSectionRanks, in the order of ranks.
/// Cost for S bytes among n ranks, sent and received by each, with l = ceil(log2(n)):
///
///   allreduce   gathered: l steps, S (n - 1) bytes
///               scattered: about log16(n) steps and those of an allgather, 2 S (n - 1) / n bytes.
///               No algorithm moves fewer (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce
///               algorithms for clusters of workstations", JPDC 69(2), 2009). Among more than
///               kSectionRanks, partial results of 16-bit floats travel as float32.
///   reducescatter   (n - 1) / 15 steps, S (n - 1) / n bytes
///   alltoall        n - 1 steps, S (n - 1) / n bytes
///   allgather   l or n - 1 steps, S (n - 1) / n bytes
///   broadcast   tree: l steps, l S bytes from the root
///               scattered: 2 l steps, up to 2 S (n - 1) / n bytes
///               chain: n - 2 + segments steps, S bytes
///   reduce      direct: (n - 1) / 15 steps, S (n - 1) bytes to the root
///               scattered: those of a reducescatter and of a gather, 2 S (n - 1) / n bytes to the
///               root, S from each other rank
///   gather, scatter   (n - 1) / 15 steps, the root receives or sends the others' parts
///   barrier     l steps, one byte each
class RingCommunicator : public HostCommunicator {
 public:
  /// `connections[r]` leads to rank r, null at `rank` itself; `waiter` outlives this.
  /// `ranks_of_member`: see TcpBoard.
  RingCommunicator(int rank, std::vector<std::unique_ptr<Connection>> connections,
                   const Waiter& waiter, std::vector<std::uint32_t> ranks_of_member = {});

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(connections_.size()); }
  TcpBoard& board() override { return board_; }

  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t> shared_offsets = {}) override;
  void broadcast(void* data, std::size_t bytes, int root) override;
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override;
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override;
  void gather(const void* input, void* output, std::span<const std::size_t> bytes,
              int root) override;
  void scatter(const void* input, void* output, std::span<const std::size_t> bytes,
               int root) override;
  void reduce_inputs(std::span<const void* const> inputs, void* output, std::size_t count,
                     const Reduction& reduction) const override;
  void barrier() override;

  /// Allreduce of partial results, in place and unscaled, between a hierarchy's reduce_partial()
  /// and finish_partial(). `partial` has accumulation_dtype(reduction).
  void allreduce_partial(void* partial, std::size_t count, const Reduction& reduction);
  /// The same to rank `root` alone; the others' `partial` may be overwritten.
  void reduce_partial_to(int root, void* partial, std::size_t count, const Reduction& reduction);

 private:
  void allreduce_gathered(const void* input, void* output, std::size_t count,
                          const Reduction& reduction);
  void reduce_scatter(const std::byte* input, std::byte* result, std::span<const Range> chunks,
                      const Reduction& reduction);
  template <class Add>
  void exchange_and_add(std::span<const OutgoingBytes> outgoing,
                        std::span<const IncomingBytes> incoming, std::size_t count,
                        std::size_t item, Add&& add);
  template <class Add>
  void exchange_with_root(std::span<const std::size_t> bytes, int root, Add&& add);
  void gather_everywhere(std::byte* data, std::span<const Range> chunks);
  void gather_chunks(std::byte* data, std::span<const Range> chunks);
  void gather_doubling(std::byte* data, std::span<const Range> chunks, int root = 0);
  template <class Part>
  void broadcast_tree(std::byte* data, int root, Part&& part);
  void broadcast_chain(void* data, std::size_t bytes, int root);

  std::size_t round_bytes() const;  // of a reduction, or of each part of a gather or scatter

  Connection* next() const { return neighbour(1); }
  Connection* prev() const { return neighbour(size() - 1); }
  Connection* neighbour(int distance) const {
    return at(connections_, (rank_ + distance) % size()).get();
  }

  const int rank_;
  const std::vector<std::unique_ptr<Connection>> connections_;
  const Waiter& waiter_;
  TcpBoard board_;
  std::vector<std::byte> received_;  // scratch: the other ranks' inputs of a chunk, or of all
  std::vector<std::byte> partials_;  // scratch: partial results among more than one section
  std::vector<std::byte> reduced_;   // scratch: this rank's chunk of a reduce to another rank
};

}  // namespace torch_ring
