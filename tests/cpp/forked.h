// SPDX-License-Identifier: Apache-2.0
// holds_in_child(): runs checks in a forked child, which may limit itself or break its memory.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>

#include "harness.h"

namespace torch_ring::test {

/// Whether `passes` returns true in a forked child, without an exception, before it counts as hung.
inline bool holds_in_child(const std::function<bool()>& passes) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    std::signal(SIGALRM, SIG_DFL);  // ends the child
    ::alarm(kHung.count());
    bool passed = false;
    try {
      passed = passes();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a child: %s\n", error.what());
    }
    ::_exit(passed ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return status == 0;
}

}  // namespace torch_ring::test
