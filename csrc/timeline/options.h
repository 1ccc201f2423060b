// TimelineOptions: what a rank's timeline is made from.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "core/clock.h"

namespace torch_ring {

struct TimelineOptions {
  int rank = 0;
  std::vector<std::string> labels;  // rank -> "rank 2 (10.0.0.7, pid 4711)"
  bool has_clock_of_rank_0 = true;
  std::string path;
  bool mark_cycles = false;
  std::function<void(const std::string&)> log;  // takes a warning; called by the thread
  // Between two writes. Programs for Horovod look for an operation 100 ms after its end.
  std::chrono::milliseconds interval{20};
  std::function<Clock::time_point()> clock = Clock::now;  // of the records
};

}  // namespace torch_ring
