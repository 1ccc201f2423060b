// SPDX-License-Identifier: Apache-2.0
// PyTimeline: a timeline in Python.
#pragma once

#include <cstdint>
#include <memory>

#include "control/control_plane.h"
#include "core/home_process.h"
#include "timeline/timeline.h"

namespace pybind11 {
class module_;
}

namespace torch_ring {

/// In a forked child it leaks the parent's timeline, whose thread does not exist there.
///
/// Thread: any, with the GIL, which stop() releases.
class PyTimeline {
 public:
  /// `plane` may be null.
  PyTimeline(Timeline::Options options, std::shared_ptr<ControlPlane> plane, std::uint64_t number,
             MessagesWorld world);
  ~PyTimeline();
  PyTimeline(const PyTimeline&) = delete;
  PyTimeline& operator=(const PyTimeline&) = delete;

  void watch(std::shared_ptr<RecordStream> stream);
  std::uint64_t dropped() const { return dropped_; }
  /// Ends it (Timeline::stop()).
  void stop(double patience_s);

 private:
  const HomeProcess home_;
  std::shared_ptr<ControlPlane> plane_;  // outlives the timeline
  std::unique_ptr<Timeline> timeline_;
  std::uint64_t dropped_ = 0;
};

void bind_timeline(pybind11::module_& module);

}  // namespace torch_ring
