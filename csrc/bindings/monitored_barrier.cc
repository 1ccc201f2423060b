#include "bindings/monitored_barrier.h"

#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace torch_ring {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPause{10};

std::string arrival(std::uint64_t number, int rank) {
  return "monitored_barrier/" + std::to_string(number) + "/" + std::to_string(rank);
}

/// Whether the key is set before the deadline; it looks once at least.
bool await_key(c10d::Store& store, const std::string& key, Clock::time_point deadline,
               const std::function<void()>& check) {
  while (!store.check({key})) {
    if (Clock::now() >= deadline) return false;
    check();
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

[[noreturn]] void fail(const std::string& why) { throw Error(ErrorKind::kTimeout, why); }

}  // namespace

void monitored_barrier(c10d::Store& store, int rank, int size, std::uint64_t number,
                       milliseconds timeout, bool wait_for_all_ranks,
                       const std::function<void()>& check) {
  const std::string after = " in " + std::to_string(timeout.count()) + " ms";
  const std::string self = "Rank " + std::to_string(rank);
  const auto deadline = Clock::now() + timeout;
  if (timeout.count() <= 0) fail(self + " timed out in monitoredBarrier: its timeout is 0");
  const std::string answer = arrival(number, 0);
  if (rank != 0) {
    store.set(arrival(number, rank), "here");
    if (await_key(store, answer, deadline, check)) return;
    fail(self +
         " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
         "from rank 0: it has not answered" +
         after + "; a rank has not come, and rank 0's error names it");
  }
  std::vector<int> missing;
  for (int other = 1; other < size; ++other) {
    if (await_key(store, arrival(number, other), deadline, check)) continue;
    missing.push_back(other);
    if (!wait_for_all_ranks) break;
  }
  for (int other = 1; other < size; ++other) store.deleteKey(arrival(number, other));
  if (!missing.empty()) {
    fail((wait_for_all_ranks ? "Ranks " : "Rank ") + listed(missing) +
         " failed to pass monitoredBarrier" + after);
  }
  if (number > 0) store.deleteKey(arrival(number - 1, 0));  // all have read it: they are here
  store.set(answer, "all");
}

}  // namespace torch_ring
