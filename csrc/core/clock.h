// The clock of every deadline.
#pragma once

#include <chrono>

namespace torch_ring {

using Clock = std::chrono::steady_clock;

}  // namespace torch_ring
