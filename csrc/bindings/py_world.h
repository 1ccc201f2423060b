// SPDX-License-Identifier: Apache-2.0
// world_of() and engine_config_of(): the parameters of an engine, from Python's arguments.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collective/world.h"
#include "control/control_plane.h"
#include "core/config.h"
#include "core/home_process.h"

namespace pybind11 {
class function;
class module_;
class object;
class str;
}  // namespace pybind11

namespace torch_ring {

/// The memory of this process's host in Python, with this rank's arena in it, for all process sets.
///
/// Thread: any. Blocking: while the system looks for memory.
class PyHostMemory {
 public:
  /// `ranks`: those of this host, ascending; `rank`: this one. Errors: Error(kInternal) if `memory`
  /// does not fit such a host.
  PyHostMemory(Fd memory, std::vector<int> ranks, int rank);

  /// In a forked child: HostMemory::leave_to_parent().
  void abandon() const noexcept { host_->leave_to_parent(); }

  std::int64_t reserve_slot() { return static_cast<std::int64_t>(arena_->reserve()); }
  std::size_t used_bytes() const { return arena_->used_bytes(); }
  void release_slot(std::int64_t offset) { arena_->release(static_cast<std::size_t>(offset)); }

  /// Gives a set's `world` its slots and the arena. `members`: the set's ranks in the world, by
  /// rank in the set; `offsets`: of their slots. Errors: Error(kInternal) if another rank's offset
  /// is invalid.
  void use(World& world, std::span<const int> members, std::span<const std::int64_t> offsets) const;

 private:
  const std::vector<int> ranks_;
  const std::shared_ptr<HostMemory> host_;
  std::vector<std::shared_ptr<const SharedMemory>> memories_;  // by index in the host
  std::shared_ptr<SharedArena> arena_;
};

void bind_host_memory(pybind11::module_& module);

/// The control plane of a process in Python. Shares ownership of the plane with the engines that
/// use it. In a forked child it leaks the parent's plane.
///
/// Thread: any, with the GIL.
class PyControlPlane {
 public:
  explicit PyControlPlane(ControlPlane::Options options);
  ~PyControlPlane() { stop(); }
  PyControlPlane(const PyControlPlane&) = delete;
  PyControlPlane& operator=(const PyControlPlane&) = delete;

  std::vector<int> missing() const { return plane_->missing(); }
  std::string trouble() const { return plane_->trouble(); }
  /// Tells the other members of a set that this rank cannot take part in it.
  void fail(std::uint64_t set, const std::string& why);
  /// Closes the data connections of a set that no engine has taken, and refuses later ones.
  void close_set(std::uint64_t set);
  /// Tells the others that this rank has left a set of `members` members without using it.
  void leave_unused(std::uint64_t set, int members, std::string why);
  /// Whether all members have left a set: then none of them uses its memory.
  bool has_ended(std::uint64_t set) const { return plane_ && plane_->has_ended(set); }
  /// The ranks that are lost.
  std::vector<int> lost() const { return plane_->lost(); }
  std::uint64_t ask(int rank) { return plane_ ? plane_->ask(rank) : 0; }
  void answer(int rank, std::uint64_t number, std::string text) {
    if (plane_) plane_->answer(rank, number, std::move(text));
  }
  /// See ControlPlane. The reader takes a query's is_question, from, number and text.
  void read_queries(pybind11::function reader);
  void want_stop(const std::string& signal) {
    if (plane_ && home_.is_here()) plane_->want_stop(signal);
  }
  std::optional<bool> pass_point() { return plane_ ? plane_->pass_point() : false; }
  std::string why_stop() const { return plane_ ? plane_->why_stop() : ""; }
  /// The number of data connections so far.
  std::uint64_t connections() const { return plane_->connections(); }
  /// The cipher of TLS; empty: no connection has any.
  std::string cipher() const { return plane_ ? plane_->cipher() : std::string(); }
  void stop(std::chrono::milliseconds patience = kGoodbyePatience, std::string why = {});

  /// In a forked child: leaks the parent's plane.
  void abandon();

  const std::shared_ptr<ControlPlane>& get() const { return plane_; }

 private:
  const HomeProcess home_;
  std::shared_ptr<ControlPlane> plane_;
};

/// The sockets of a set, which keep the plane alive.
std::unique_ptr<SocketSource> sockets_of(std::shared_ptr<ControlPlane> plane, std::uint64_t set,
                                         std::vector<int> members, int width);

/// The wait-for graph of a set, which keeps the plane alive.
std::shared_ptr<WaitGraph> waits_of(const std::shared_ptr<ControlPlane>& plane, std::uint64_t set,
                                    std::vector<int> members, std::chrono::milliseconds patience);

void bind_control_plane(pybind11::module_& module);

/// A Python string of bytes that another program may have sent; invalid UTF-8 is replaced. Thread:
/// with the GIL.
pybind11::str as_text(std::string_view bytes);

/// The settings of a torch_ring.config.Config; a timeout is rounded up to milliseconds.
EngineConfig engine_config_of(const pybind11::object& config);

/// The world of one of `members` (torch_ring/_C.pyi, Engine). `plane` and `memory` may be null.
/// `ucx_library`: the parameter of ucx::load(); none: bytes between hosts travel over TCP.
/// Errors: ValueError if `host_of` does not name every member; those of ucx::load() and Worker.
World world_of(int rank, const std::vector<int>& members, std::vector<int> host_of,
               std::vector<std::string> labels, bool may_spin,
               const std::shared_ptr<ControlPlane>& plane, std::uint64_t set,
               const std::shared_ptr<PyHostMemory>& memory, const std::vector<std::int64_t>& slots,
               const std::optional<std::string>& ucx_library, const EngineConfig& config);

}  // namespace torch_ring
