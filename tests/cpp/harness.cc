// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_ring::test {

namespace {

struct Test {
  std::string name;
  std::function<void()> body;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;  // static initialisers of all files fill it
  return all;
}

const char* running = "";

[[noreturn]] void end_hung(const std::vector<bool>& done, const std::string& errors) {
  std::string ranks;
  for (std::size_t i = 0; i < done.size(); ++i) {
    if (!done[i]) ranks += " " + std::to_string(i);
  }
  std::printf("HUNG    %s: still running: rank%s\n%s", running, ranks.c_str(), errors.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

/// Ends the program when a test waits for something other than its ranks, as for a child.
void end_at_alarm(int) {
  for (const char* part : {"HUNG    ", running, "\n"}) {
    [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, part, std::strlen(part));
  }
  ::_exit(1);
}

bool run(const Test& test) {
  running = test.name.c_str();
  ::alarm(4 * kHung.count());  // a test may let ranks run several times
  try {
    test.body();
    return true;
  } catch (const std::exception& error) {
    std::printf("FAILED  %s\n%s\n", running, error.what());
    return false;
  }
}

bool selected(const Test& test, const std::vector<const char*>& filters) {
  for (const char* filter : filters) {
    if (test.name.find(filter) != std::string::npos) return true;
  }
  return filters.empty();
}

}  // namespace

bool add_test(std::string name, std::function<void()> body) {
  tests().push_back({std::move(name), std::move(body)});
  return true;
}

bool add_test(const char* name, void (*body)()) {
  return add_test(std::string(name), std::function<void()>(body));
}

void fail(const char* file, int line, const std::string& what) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

void fail_condition(const char* file, int line, const char* condition) {
  fail(file, line, std::string("not true: ") + condition);
}

void check_throws(const char* file, int line, Call call, ErrorKind kind, std::string_view part) {
  try {
    call.run(call.object);
  } catch (const Error& error) {
    const std::string what = error.what();
    if (error.kind() != kind) fail(file, line, "an error of another kind: " + what);
    if (what.find(part) == std::string::npos)
      fail(file, line, what + "\nlacks: " + std::string(part));
    return;
  }
  fail(file, line, "nothing was thrown");
}

void run_ranks(int ranks, const std::function<void(int)>& fn) {
  const auto count = static_cast<std::size_t>(ranks);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done(count, false);
  std::string errors;

  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      std::string error;
      try {
        fn(static_cast<int>(rank));
      } catch (const std::exception& thrown) {
        error = "rank " + std::to_string(rank) + ": " + thrown.what() + "\n";
      }
      const std::scoped_lock lock(mutex);
      errors += error;
      done[rank] = true;
      changed.notify_one();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto all_done = [&] { return done == std::vector<bool>(count, true); };
    if (!changed.wait_for(lock, kHung, all_done)) end_hung(done, errors);
  }
  for (std::thread& thread : threads) thread.join();
  if (!errors.empty()) throw CheckFailed(errors);
}

}  // namespace torch_ring::test

/// Usage: [--list] [PART OF A NAME]...
#ifdef __SANITIZE_THREAD__
/// ThreadSanitizer clears its shadow of each new block: up to this size by writing, beyond it by
/// mapping it anew, which costs two faults a page, and halts all processors for each. Blocks of the
/// tests' data are below, and the stacks of threads, of which little is used, above.
extern "C" const char* __tsan_default_options() { return "clear_shadow_mmap_threshold=4194304"; }
#endif

int main(int argc, char** argv) {
  using namespace torch_ring::test;
  bool list = false;
  std::vector<const char*> filters;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--list") == 0) {
      list = true;
    } else {
      filters.push_back(argv[i]);
    }
  }

  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::signal(SIGALRM, end_at_alarm);
  int passed = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (!selected(test, filters)) continue;
    if (list) {
      std::printf("%s\n", test.name.c_str());
    } else if (run(test)) {
      ++passed;
    } else {
      ++failed;
    }
  }
  if (list) return 0;
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0 ? 1 : 0;
}
