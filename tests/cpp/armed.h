// SPDX-License-Identifier: Apache-2.0
// Armed: failpoints for the time of a test.
#pragma once

#include <string>

#include "core/failpoint.h"

namespace torch_ring::test {

class Armed {
 public:
  explicit Armed(const std::string& spec) { arm_failpoints(spec); }
  ~Armed() { arm_failpoints(""); }
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
};

}  // namespace torch_ring::test
