// capture_problem(): what may not be captured into a CUDA graph.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace torch_ring {

/// What would be captured.
enum class Captured { kCollective, kBackward };

/// Why `what` must not run now, if this thread's current stream on `device` is being captured into
/// a graph: a replay runs on the device alone, so no rank would agree on its collectives, and no
/// hook would see its gradients. Nothing for the CPU. It takes the GIL: hold no lock. Thread: any.
/// Blocking: no.
std::optional<std::string> capture_problem(c10::Device device, Captured what);

}  // namespace torch_ring
