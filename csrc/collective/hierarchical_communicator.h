// SPDX-License-Identifier: Apache-2.0
// HierarchicalCommunicator: collectives among several hosts with several ranks each.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "collective/hierarchical_board.h"
#include "collective/ring_communicator.h"
#include "collective/routed_alltoall.h"
#include "collective/shm_communicator.h"

namespace torch_ring {

/// Shared memory inside hosts and a RingCommunicator across them per lane. With L lanes, local rank
/// j < L reduces chunk j inside its host, then with the j-th ranks of all hosts, and writes the
/// result to all buffers of its host. For S bytes on h hosts each host sends 2 S (h - 1) / h bytes,
/// regardless of its number of ranks, on L connections at once.
///
/// So the values of a host's ranks are added first, in the order of ranks, then those of the hosts.
///
/// In a reduce the lanes reduce to the root's host, which receives S (h - 1) or 2 S (h - 1) / h
/// bytes (RingCommunicator), and the result is written to the root's buffer alone. In a gather each
/// host's parts go through shared memory to one rank, from there on one lane to the root's host,
/// and to the root; a scatter is the reverse. Each byte travels once between hosts. The lane is the
/// root's, if it has one.
///
/// A reducescatter is an allreduce of which each rank copies only its part, so the network moves up
/// to twice the necessary bytes. An alltoall takes three hops (routed_alltoall.h).
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
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override;
  void gather(const void* input, void* output, std::span<const std::size_t> bytes,
              int root) override;
  void scatter(const void* input, void* output, std::span<const std::size_t> bytes,
               int root) override;
  void reduce_inputs(std::span<const void* const> inputs, void* output, std::size_t count,
                     const Reduction& reduction) const override;
  void barrier() override;
  bool has_shared_memory() const override { return true; }
  std::shared_ptr<void> allocate_shared(std::size_t bytes) override {
    return shm_.allocate_shared(bytes);
  }
  void isolate(const void* data, std::size_t bytes) noexcept override { shm_.isolate(data, bytes); }
  std::int64_t shared_offset_of(const void* data, std::size_t bytes) const override {
    return shm_.shared_offset_of(data, bytes);
  }

 private:
  bool leads() const { return shm_.rank() == 0; }

  /// The buffers of this host's ranks: those at `shared_offsets`, or their staging_ if it is empty.
  std::vector<std::byte*> buffers_of_host(std::span<const std::int64_t> shared_offsets);

  /// Allreduce of a private tensor, round by round. Calls take(range) when staging_ has the results
  /// of these elements. With a `root`, only that rank gets them (here and below).
  template <class Take>
  void allreduce_in_rounds(const void* input, std::size_t count, const Reduction& reduction,
                           Take&& take, std::optional<int> root = {});

  /// Allreduce of buffers in shared memory. `buffers` are those of this host; all ranks have
  /// written theirs.
  void allreduce_in_place(std::span<std::byte* const> buffers, std::size_t count,
                          const Reduction& reduction, std::optional<int> root = {});

  /// The index of a rank among those of its host.
  int index_of(int rank) const;
  bool is_on_host_of(int rank) const { return at(host_of_, rank_) == at(host_of_, rank); }

  /// The index, on each host, of the rank that passes the data of a gather or scatter on.
  int lane_of(int root) const { return index_of(root) < lanes_ ? index_of(root) : 0; }

  /// The bytes of the parts of this host's ranks, and of each host.
  std::vector<std::size_t> bytes_of_ranks(std::span<const std::size_t> bytes) const;
  std::vector<std::size_t> bytes_of_hosts(std::span<const std::size_t> bytes) const;
  template <class Fn>
  void for_parts_by_host(std::span<const std::size_t> bytes, Fn&& fn) const;

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
