// Names: the names of requests that were given none.
#pragma once

#include <cstdint>
#include <string>

#include "engine/request.h"

namespace torch_ring {

/// Numbers requests: the same on all ranks if these make them in the same order. Where every rank
/// waits for the same thing an era begins, so that ranks which had lost step agree again.
class Names {
 public:
  /// "#7", or "#2.7" in a later era. Barriers have numbers of their own: ranks that have submitted
  /// different numbers of requests still wait at the same one.
  std::string next(Collective collective) {
    std::string name = "#";
    if (era_ > 0) name.append(std::to_string(era_)).append(".");
    if (collective == Collective::kBarrier) {
      return name.append("barrier.").append(std::to_string(++barriers_));
    }
    return name.append(std::to_string(++numbered_));
  }

  /// Begins an era.
  void renew() {
    ++era_;
    numbered_ = 0;
    barriers_ = 0;
  }

 private:
  std::uint64_t era_ = 0;
  std::uint64_t numbered_ = 0;
  std::uint64_t barriers_ = 0;
};

}  // namespace torch_ring
