// PyControlPlane: the control plane of a process, as Python holds it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/control_plane.h"

namespace pybind11 {
class function;
class module_;
}  // namespace pybind11

namespace torch_ring {

/// Owns the plane together with the engines that use it. In a forked child it lets go of the
/// parent's plane.
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
  /// Tells the others that this rank has left a set of so many members, which it has not used.
  void leave_unused(std::uint64_t set, int members);
  /// Whether all its members have left a set: then none of them uses its memory.
  bool has_ended(std::uint64_t set) const { return plane_ && plane_->has_ended(set); }
  /// Why this process leaves, for the other ranks' errors.
  void give_reason(std::string why);
  /// The ranks that are lost.
  std::vector<int> lost() const { return plane_->lost(); }
  std::uint64_t ask(int rank) { return plane_ ? plane_->ask(rank) : 0; }
  void answer(int rank, std::uint64_t number, std::string text) {
    if (plane_) plane_->answer(rank, number, std::move(text));
  }
  /// See ControlPlane. The reader takes a letter's is_question, from, number and text.
  void read_letters(pybind11::function reader);
  /// The data connections that have been made so far.
  std::uint64_t connections() const { return plane_->connections(); }
  void stop(std::chrono::milliseconds patience = kPartingPatience);

  /// Takes note of the descriptors that a child is about to inherit.
  void before_fork();
  /// In a forked child: closes the parent's connections, and leaks its thread and memory.
  void abandon();

  const std::shared_ptr<ControlPlane>& get() const { return plane_; }

 private:
  const pid_t pid_;
  std::vector<std::pair<int, ino_t>> inherited_;
  std::shared_ptr<ControlPlane> plane_;
};

/// The sockets of a set, which keep the plane alive.
std::unique_ptr<SocketSource> sockets_of(std::shared_ptr<ControlPlane> plane, std::uint64_t set,
                                         std::vector<int> members, int width);

/// The wait-for graph of a set, which keeps the plane alive.
std::shared_ptr<WaitGraph> waits_of(const std::shared_ptr<ControlPlane>& plane, std::uint64_t set,
                                    std::vector<int> members, std::chrono::milliseconds patience);

void bind_control_plane(pybind11::module_& module);

}  // namespace torch_ring
