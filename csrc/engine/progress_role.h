// ProgressRole: the role of the progress thread, and the driver that it alone reaches.
#pragma once

#include <cassert>
#include <cstdint>
#include <thread>
#include <utility>

#include "engine/driver.h"

namespace torch_ring {

/// At most one thread at a time has the role. It takes the role by making a Turn, and only a Turn
/// gives access to the driver, but for its device.
///
/// The progress thread *pauses* in an interrupt: it keeps the role, and nothing is half done. Then
/// it may take another turn inside its own.
///
/// Thread: any, with the lock, but for pause(). Blocking: no.
class ProgressRole {
 public:
  using Lock = RequestQueue::Lock;

  /// The parameters are the driver's.
  template <class... Args>
  explicit ProgressRole(Args&&... args) : driver_(std::forward<Args>(args)...) {}
  ProgressRole(const ProgressRole&) = delete;
  ProgressRole& operator=(const ProgressRole&) = delete;

  bool is_taken(const Lock&) const { return taken_; }

  /// Whether the calling thread has the role.
  bool is_mine(const Lock&) const { return taken_ && thread_ == std::this_thread::get_id(); }

  /// Whether the calling thread has the role, and pauses.
  bool is_paused_here(const Lock& lock) const { return is_mine(lock) && paused_; }

  /// Whether the role is free though the driver has works left.
  bool is_needed(const Lock&) const { return !taken_ && !driver_.idle(); }

  /// The part of the driver that other threads reach, too, to launch. Needs no lock.
  DeviceExecutor& device() { return driver_.device(); }

  /// Driver::rounds(). Needs no lock.
  std::uint64_t rounds() const { return driver_.rounds(); }

  /// Calls `interrupt` as a pause of this turn. Thread: the progress thread, without the lock.
  template <class Interrupt>
  void pause(Interrupt&& interrupt) {
    paused_ = true;
    interrupt();
    paused_ = false;
  }

  /// Gives the role away in a pause, and takes it back: another thread may have it in between.
  void lend(const Lock&) { taken_ = false; }
  void take_back(const Lock&) {
    taken_ = true;
    thread_ = std::this_thread::get_id();
    paused_ = true;
  }

  /// The calling thread's turn as the progress thread. The constructor and the destructor need the
  /// lock; the driver is used without it. The role must be free, or this thread's own in a pause.
  class Turn {
   public:
    Turn(ProgressRole& role, const Lock& lock) : role_(role), nested_(role.taken_) {
      assert(lock.owns_lock() && (!nested_ || role.is_paused_here(lock)));
      role_.taken_ = true;
      role_.thread_ = std::this_thread::get_id();
      role_.paused_ = false;
    }
    ~Turn() {
      role_.taken_ = role_.paused_ = nested_;
      if (!nested_) role_.thread_ = {};
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    Driver& driver() const { return role_.driver_; }

   private:
    ProgressRole& role_;
    const bool nested_;
  };

 private:
  Driver driver_;
  bool taken_ = false;
  std::thread::id thread_;  // the progress thread; nobody's id while the role is free
  bool paused_ = false;  // only the progress thread reads and writes it, so pause() needs no lock
};

}  // namespace torch_ring
