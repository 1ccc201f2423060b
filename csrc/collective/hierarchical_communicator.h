// HierarchicalCommunicator: collectives among several hosts with several ranks each.
#pragma once

#include <memory>
#include <vector>

#include "collective/hierarchical_board.h"
#include "collective/ring_communicator.h"
#include "collective/routed_alltoall.h"
#include "collective/shm_communicator.h"

namespace torch_ring {

/// Shared memory inside hosts and a RingCommunicator across them per lane. With L lanes, local rank
/// j < L reduces chunk j of its host, reduces that among the j-th ranks of all hosts, and writes
/// the result to all buffers of its host. For S bytes on h hosts each host sends 2 S (h - 1) / h
/// bytes, whatever its number of ranks, on L connections at once.
///
/// So the values of a host's ranks are added first, in the order of ranks, then those of the hosts.
///
/// A reducescatter is such an allreduce, of which each rank copies its part only, so the network
/// moves up to twice the necessary bytes. An alltoall takes three hops (routed_alltoall.h).
class HierarchicalCommunicator : public HostCommunicator {
 public:
  HierarchicalCommunicator(World& world, const EngineConfig& config, const Abort& abort);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Board& board() override { return *board_; }
  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t> shared_offsets) override;
  void broadcast(void* data, std::size_t bytes, int root) override;
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override;
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override;
  void reduce_inputs(std::span<const void* const> inputs, void* output, std::size_t count,
                     const Reduction& reduction) const override;
  void barrier() override;
  SharedBuffers* shared_buffers() override { return shm_.shared_buffers(); }

 private:
  bool leads() const { return shm_.rank() == 0; }

  /// The buffers of this host's ranks: those at shared_offsets, or their staging_ if
  /// that is empty.
  std::vector<std::byte*> buffers_of_host(std::span<const std::int64_t> shared_offsets);

  /// Allreduce of a private tensor, round by round. Calls take(range) when staging_ has the results
  /// of these elements.
  template <class Take>
  void allreduce_in_rounds(const void* input, std::size_t count, const Reduction& reduction,
                           Take&& take);

  /// Allreduce of buffers in shared memory. `buffers` are those of this host; all ranks have
  /// written theirs.
  void allreduce_in_place(std::span<std::byte* const> buffers, std::size_t count,
                          const Reduction& reduction);

  const int rank_;
  const int size_;
  const std::vector<int> host_of_;
  const std::vector<std::vector<int>> ranks_of_host_;
  const int lanes_;
  const Routes routes_;
  const std::unique_ptr<SocketSource> sockets_;
  ShmCommunicator shm_;
  std::unique_ptr<RingCommunicator> lane_;  // null on ranks without a lane
  std::unique_ptr<HierarchicalBoard> board_;
  std::byte* const staging_;        // in shared memory, for rounds of private tensors
  std::vector<std::byte> partial_;  // scratch: the chunk that the ring reduces
};

}  // namespace torch_ring
