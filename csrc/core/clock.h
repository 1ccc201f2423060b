// Clock and kSpin: the clock of every deadline, and how long a wait spins.
#pragma once

#include <chrono>

namespace torch_ring {

using Clock = std::chrono::steady_clock;

/// How long a rank spins before it sleeps, where every rank has a core. A wake-up costs 12 to 40 us
/// (docs/tuning.md): a spin of that length costs at most twice the best choice.
inline constexpr std::chrono::microseconds kSpin{40};

}  // namespace torch_ring
