// SPDX-License-Identifier: Apache-2.0
#include "core/home_process.h"

#include <pthread.h>

namespace torch_ring {

std::atomic<unsigned> forks_so_far{0};

namespace {

[[maybe_unused]] const int counts_forks = ::pthread_atfork(
    nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

}  // namespace torch_ring
