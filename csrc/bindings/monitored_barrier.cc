#include "bindings/monitored_barrier.h"

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

namespace torch_ring {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{10};
// Rank 0 gives the others this long to read its answer, before it may end the store.
constexpr std::chrono::seconds kReading{5};

std::string nonce() {
  std::random_device random;
  return std::to_string((static_cast<std::uint64_t>(random()) << 32U) | random());
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

[[noreturn]] void fail(const std::string& why) { throw Error(ErrorKind::kTimeout, why); }

/// The values of one barrier in the store. Each side tells the other a random number, and believes
/// a value only if it has its own: what an earlier barrier or group of the same name has left, of
/// which the store may be full, is never taken for this one's.
class Board {
 public:
  Board(c10d::Store& store, std::uint64_t number)
      : store_(store), number_(std::to_string(number)) {}

  void write(const std::string& key, const std::string& value) {
    store_.set(kPrefix + key, number_ + " " + value);
  }

  /// This barrier's value; empty: there is none.
  std::string read(const std::string& key) const {
    if (!store_.check({kPrefix + key})) return "";
    const std::vector<std::uint8_t> bytes = store_.get(kPrefix + key);
    const std::string text(bytes.begin(), bytes.end());
    return text.starts_with(number_ + " ") ? text.substr(number_.size() + 1) : "";
  }

 private:
  static constexpr const char* kPrefix = "monitored_barrier/";

  c10d::Store& store_;
  const std::string number_;
};

/// Whether `is_there` holds before the deadline; it looks once at least.
bool await(Clock::time_point deadline, const std::function<bool()>& is_there,
           const std::function<void()>& check) {
  milliseconds pause = kFirstPause;
  while (!is_there()) {
    if (Clock::now() >= deadline) return false;
    try {
      check();
    } catch (const Error&) {
      if (is_there()) return true;  // a rank that has passed the barrier may have left
      throw;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

std::string here(int rank) { return "here/" + std::to_string(rank); }
std::string answer(int rank) { return "answer/" + std::to_string(rank); }
std::string seen(int rank) { return "seen/" + std::to_string(rank); }

/// Rank 0: returns the ranks that have not come.
std::vector<int> gather(Board& board, int size, Clock::time_point deadline, bool wait_for_all_ranks,
                        const std::function<void()>& check) {
  const std::string call = nonce();
  board.write("call", call);
  std::vector<int> missing;
  std::vector<std::string> told(static_cast<std::size_t>(size));  // by rank
  for (int other = 1; other < size; ++other) {
    std::string& text = told[static_cast<std::size_t>(other)];
    const auto has_come = [&] { return (text = board.read(here(other))).starts_with(call + " "); };
    if (await(deadline, has_come, check)) continue;
    missing.push_back(other);
    if (!wait_for_all_ranks) break;
  }
  if (!missing.empty()) return missing;
  for (int other = 1; other < size; ++other) {
    board.write(answer(other), told[static_cast<std::size_t>(other)].substr(call.size() + 1));
  }
  const auto until = std::min(deadline, Clock::now() + kReading);
  for (int other = 1; other < size; ++other) {
    if (!await(until, [&] { return board.read(seen(other)) == call; }, [] {})) break;
  }
  return missing;
}

/// Another rank: returns whether rank 0 has answered.
bool come(Board& board, int rank, Clock::time_point deadline, const std::function<void()>& check) {
  const std::string own = nonce();
  std::string call;
  const auto is_answered = [&] {
    const std::string now = board.read("call");
    if (now != call) board.write(here(rank), (call = now) + " " + own);
    return board.read(answer(rank)) == own;
  };
  if (!await(deadline, is_answered, check)) return false;
  board.write(seen(rank), call);
  return true;
}

}  // namespace

void monitored_barrier(c10d::Store& store, int rank, int size, std::uint64_t number,
                       milliseconds timeout, bool wait_for_all_ranks,
                       const std::function<void()>& check) {
  const std::string after = " in " + std::to_string(timeout.count()) + " ms";
  const std::string self = "Rank " + std::to_string(rank);
  if (timeout.count() <= 0) fail(self + " timed out in monitoredBarrier: its timeout is 0");
  const auto deadline = Clock::now() + timeout;
  Board board(store, number);
  if (rank == 0) {
    const std::vector<int> missing = gather(board, size, deadline, wait_for_all_ranks, check);
    if (missing.empty()) return;
    fail((wait_for_all_ranks ? "Ranks " : "Rank ") + listed(missing) +
         " failed to pass monitoredBarrier" + after);
  }
  const std::string received =
      self +
      " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
      "from rank 0: ";
  bool answered = false;
  try {
    answered = come(board, rank, deadline, check);
  } catch (const c10::DistError& error) {
    fail(received + "the store is gone, has rank 0 ended? " + error.what_without_backtrace());
  }
  if (!answered) {
    fail(received + "it has not answered" + after +
         "; a rank has not come, and rank 0's error names it");
  }
}

}  // namespace torch_ring
