// The clock of every deadline, and how long a wait spins.
#pragma once

#include <chrono>

namespace torch_ring {

using Clock = std::chrono::steady_clock;

/// How long a rank spins before it sleeps, where every rank has a core. A wake-up costs 12 to 40 us
/// (docs/tuning.md): as long as that is never worse than twice the best.
inline constexpr std::chrono::microseconds kSpin{40};

}  // namespace torch_ring
