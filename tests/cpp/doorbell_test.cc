// SPDX-License-Identifier: Apache-2.0
// The doorbell: sleepers in a futex and in poll, rung by threads and by other processes.
#include "transport/doorbell.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "descriptors.h"
#include "test_world.h"

namespace torch_ring::test::doorbell_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kSoon = seconds(20);  // only a lost wake-up takes so long

/// A socket that is never ready, so that a sleeper polls.
struct Silent {
  std::pair<Fd, Fd> ends = unix_pair();
  std::array<pollfd, 1> fds{pollfd{ends.first.get(), POLLIN, 0}};
};

/// A way to sleep: its name in a test's title, and the state.
struct Way {
  const char* name;
  Doorbell::State state;
};
constexpr std::array<Way, 2> kWays{Way{"futex", Doorbell::kInFutex},
                                   Way{"poll", Doorbell::kInPoll}};

std::span<const pollfd> fds_of(const Way& way, const Silent& silent) {
  if (way.state == Doorbell::kInFutex) return {};
  return silent.fds;
}

void await_state(const Doorbell::Word& word, std::uint32_t state) {
  const auto deadline = Clock::now() + kSoon;
  while (word.state.load() != state && Clock::now() < deadline) std::this_thread::yield();
  CHECK_EQ(word.state.load(), state);
}

/// A page of memory shared with a forked child.
template <class T>
struct Shared {
  Shared() : value(new (mapped()) T{}) {}
  ~Shared() { ::munmap(value, sizeof(T)); }
  static void* mapped() {
    void* const memory =
        ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
  }
  T* const value;
};

struct Pair {
  Doorbell::Word word;
  std::atomic<int> data;
};

/// Waits until `child` has succeeded.
void join(pid_t child) {
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

/// A sleeper and a ringer in turns: the ringer stores a number and rings; the sleeper waits for it,
/// stores it, too, and rings. A lost wake-up makes a sleep last kSoon.
void play(Doorbell& own, Doorbell::Word& peer, std::atomic<int>& mine, std::atomic<int>& theirs,
          bool begins, int rounds, const Way& way) {
  const Silent silent;
  for (int round = 1; round <= rounds; ++round) {
    if (begins) {
      mine.store(round, std::memory_order_seq_cst);
      own.ring(peer);
    }
    const auto deadline = Clock::now() + kSoon;
    const auto ready = [&] { return theirs.load(std::memory_order_seq_cst) >= round; };
    while (!ready()) {
      own.sleep(ready, deadline, fds_of(way, silent));
      CHECK(Clock::now() < deadline);
    }
    if (!begins) {
      mine.store(round, std::memory_order_seq_cst);
      own.ring(peer);
    }
  }
}

[[maybe_unused]] const bool kAdded = [] {
  for (const Way& way : kWays) {
    const auto add = [&](const std::string& what, const std::function<void()>& body) {
      add_test("doorbell, " + std::string(way.name) + ": " + what, body);
    };
    add("ring() and wake() end a sleep", [=] {
      Doorbell::Word word;
      Doorbell sleeper(word);
      Doorbell ringer;
      std::atomic<int> data{0};
      run_ranks(2, [&](int rank) {
        const Silent silent;
        for (int i = 1; i <= 4; ++i) {
          if (rank == 0) {
            const auto deadline = Clock::now() + kSoon;
            while (data < i)
              sleeper.sleep([&] { return data >= i; }, deadline, fds_of(way, silent));
            CHECK(Clock::now() < deadline);
          } else {
            await_state(word, way.state);
            data = i;
            i % 2 == 0 ? sleeper.wake() : ringer.ring(word);
          }
        }
      });
      CHECK_EQ(word.state.load(), std::uint32_t{Doorbell::kAwake});
    });
    add("a sleep ends at its deadline", [=] {
      Doorbell sleeper;
      const Silent silent;
      for (const auto time : {milliseconds(-1'000'000'000), milliseconds(0), milliseconds(40)}) {
        const auto begin = Clock::now();
        sleeper.sleep([] { return false; }, begin + time, fds_of(way, silent));
        CHECK(Clock::now() >= begin + time);
        CHECK(Clock::now() < begin + kSoon);
      }
      sleeper.sleep([] { return false; }, Clock::time_point{} + seconds(1), fds_of(way, silent));
    });
    add("no wake-up is lost among many ringers and wakers", [=] {
      constexpr int kRingers = 4;
      constexpr int kRounds = kSanitized ? 500 : 3'000;
      Doorbell::Word word;
      Doorbell sleeper(word);
      std::array<std::atomic<int>, kRingers> data{};
      std::atomic<int> taken{0};
      run_ranks(kRingers + 1, [&](int rank) {
        if (rank < kRingers) {  // the first one is a thread of the sleeper's process
          Doorbell ringer;
          for (int i = 1; i <= kRounds; ++i) {
            at(data, rank).store(i, std::memory_order_seq_cst);
            rank == 0 ? sleeper.wake() : ringer.ring(word);
            // Sleeps: beside other processes, four yielding threads would delay the sleeper.
            for (int seen = taken.load(); seen < i; seen = taken.load()) taken.wait(seen);
          }
          return;
        }
        const Silent silent;
        for (int i = 1; i <= kRounds; ++i) {
          const auto ready = [&] {
            for (const auto& one : data) {
              if (one.load(std::memory_order_seq_cst) < i) return false;
            }
            return true;
          };
          const auto deadline = Clock::now() + kSoon;
          while (!ready()) {
            // In turns, like a leader, so that a late ring for one way meets a sleep of the other.
            const bool other = i % 3 == 0;
            sleeper.sleep(ready, deadline, other ? std::span<const pollfd>{} : fds_of(way, silent));
            CHECK(Clock::now() < deadline);
          }
          taken.store(i);
          taken.notify_all();
        }
      });
    });
    add("a forked process rings and is rung", [=] {
      if (kSanitized) return;  // sanitizers restrict the child of a process with threads
      const Shared<std::array<Pair, 2>> shared;
      auto& pairs = *shared.value;
      constexpr int kRounds = 5'000;
      const pid_t child = ::fork();
      CHECK(child >= 0);
      const auto run = [&](std::size_t own) {
        Doorbell doorbell(pairs[own].word);
        play(doorbell, pairs[1 - own].word, pairs[own].data, pairs[1 - own].data, own == 0, kRounds,
             way);
      };
      if (child == 0) {
        try {
          run(1);
        } catch (...) {
          ::_exit(1);
        }
        ::_exit(0);
      }
      run(0);
      join(child);
    });
    add("wake() ends a sleep whose ringer has died before it woke the sleeper", [=] {
      Doorbell::Word word;
      Doorbell sleeper(word);
      std::atomic<bool> told{false};
      run_ranks(2, [&](int rank) {
        const Silent silent;
        const auto deadline = Clock::now() + kSoon;
        if (rank == 0) {
          while (!told) sleeper.sleep([&] { return told.load(); }, deadline, fds_of(way, silent));
          CHECK(Clock::now() < deadline);
        } else {
          await_state(word, way.state);
          word.state = Doorbell::kAwake;  // without a wake-up
          told = true;
          sleeper.wake();
        }
      });
    });
  }
  return true;
}();

TEST(doorbell_sleep_ends_when_a_polled_socket_is_ready) {
  Silent silent;
  Doorbell sleeper;
  CHECK_EQ(::write(silent.ends.second.get(), "x", 1), ssize_t{1});
  const auto begin = Clock::now();
  sleeper.sleep([] { return false; }, begin + kSoon, silent.fds);
  CHECK(Clock::now() < begin + kSoon);
}

TEST(doorbell_rings_that_come_too_late_wake_once_in_vain) {
  const Silent silent;
  Doorbell::Word word;
  Doorbell sleeper(word);
  Doorbell ringer;
  sleeper.sleep([] { return false; }, Clock::now(), silent.fds);  // makes the socket
  for (int i = 0; i < 5; ++i) {
    word.state = Doorbell::kInPoll;
    ringer.ring(word);
  }
  const auto begin = Clock::now();
  sleeper.sleep([] { return false; }, begin + kSoon, silent.fds);  // takes all of them
  CHECK(Clock::now() < begin + kSoon);
  const auto again = Clock::now();
  sleeper.sleep([] { return false; }, again + milliseconds(30), silent.fds);
  CHECK(Clock::now() >= again + milliseconds(30));
}

/// More unread rings, at peers that do not read, than a socket may have: the last peer is rung,
/// too.
TEST(doorbell_rings_peers_however_many_rings_are_unread) {
  constexpr std::size_t kPeers = 600;
  rlimit files{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_cur < kPeers + 100) return;
  const Silent silent;
  std::vector<std::unique_ptr<Doorbell::Word>> words;
  std::vector<std::unique_ptr<Doorbell>> sleepers;
  for (std::size_t i = 0; i < kPeers; ++i) {
    words.push_back(std::make_unique<Doorbell::Word>());
    sleepers.push_back(std::make_unique<Doorbell>(*words.back()));
    sleepers.back()->sleep([] { return false; }, Clock::now(), silent.fds);
    words.back()->state = Doorbell::kInPoll;  // about to poll
  }
  Doorbell ringer;
  for (const auto& word : words) ringer.ring(*word);
  const auto deadline = Clock::now() + kSoon;
  for (const auto& sleeper : sleepers) {
    sleeper->sleep([] { return false; }, deadline, silent.fds);
  }
  CHECK(Clock::now() < deadline);
}

/// A ring that cannot be sent for want of descriptors is an error and no lost wake-up.
TEST(doorbell_without_descriptors_is_an_error) {
  const Silent silent;
  Doorbell::Word word;
  Doorbell sleeper(word);
  Doorbell ringer;
  const DescriptorLimit none(0);
  CHECK_THROWS(sleeper.sleep([] { return false; }, Clock::now(), silent.fds), ErrorKind::kInternal,
               "socket, for a doorbell");
  word.state = Doorbell::kInPoll;
  CHECK_THROWS(ringer.ring(word), ErrorKind::kInternal, "socket, for a doorbell");
}

}  // namespace
}  // namespace torch_ring::test::doorbell_test
