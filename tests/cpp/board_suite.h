// SPDX-License-Identifier: Apache-2.0
// board_suite: tests that every Board passes.
#pragma once

#include <algorithm>
#include <barrier>
#include <latch>
#include <random>
#include <thread>

#include "elements.h"
#include "test_world.h"

namespace torch_ring::test {

/// A deadline that no wait reaches.
constexpr Clock::time_point kNever = Clock::time_point::max();

/// A Post that owns its bytes.
struct OwnedPost {
  Bytes common;
  Bytes own;
  Bytes local;

  Post post() const { return {common, own, local}; }
};

/// The entry of `rank` in `round`, which every other rank can compute, too. In some rounds all
/// ranks post the same, in some all but one.
inline OwnedPost entry_of(int rank, int round, const Board& board) {
  const auto part = [](int seed, std::size_t longest) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const std::size_t bytes = random() % 4 == 0 ? 0 : random() % (longest + 1);
    return Elements::repeating(DType::kUInt8, bytes, 100,
                               [&](std::size_t) { return static_cast<double>(random() % 256); })
        .bytes();
  };
  const int seed = 1000 * round;
  const bool alike = round % 4 == 1 || (round % 4 == 2 && rank != 1);
  if (round % 16 == 13) return {Bytes(board.capacity(), std::byte{7}), {}, {}};
  if (round % 16 == 15) {
    const std::size_t half = board.safe_capacity() / 16 * 8;
    const auto fill = static_cast<std::byte>(rank);
    return {Bytes(half, fill), Bytes(board.safe_capacity() - half - 8, fill), part(rank, 8)};
  }
  return {part(alike ? seed : seed + rank, 200),
          round % 8 < 6 ? Bytes{} : part(seed + rank + 1, 90), part(seed + rank + 2, 24)};
}

inline void wait_complete(Board& board) {
  while (!board.complete()) board.wait_until(kNever, kSpin);
}

inline Bytes copy_of(ByteSpan bytes) { return {bytes.begin(), bytes.end()}; }

/// The run that has `rank`'s entry.
inline const Run& run_of(const Round& round, int rank) {
  for (const Run& run : round.runs) {
    if (rank >= run.first && rank < run.first + run.count) return run;
  }
  throw CheckFailed("no run has rank " + std::to_string(rank));
}

inline void board_rounds(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    std::mt19937 random(static_cast<unsigned>(communicator.rank()));
    for (int round = 0; round < 100; ++round) {
      for (auto pauses = random() % 8; pauses > 0; --pauses) std::this_thread::yield();
      board.post(entry_of(communicator.rank(), round, board).post());
      wait_complete(board);
      CHECK(board.missing().empty());
      const Round seen = board.round();
      for (int rank = 0; rank < size; ++rank) {
        const OwnedPost expected = entry_of(rank, round, board);
        CHECK(same(copy_of(run_of(seen, rank).common), expected.common));
        CHECK(same(copy_of(run_of(seen, rank).own), expected.own));
      }
      CHECK_EQ(std::ranges::count(seen.host_ranks, communicator.rank()), 1);
      CHECK_EQ(seen.locals.size(), seen.host_ranks.size());
      for (std::size_t i = 0; i < seen.locals.size(); ++i) {
        CHECK(same(copy_of(seen.locals[i]), entry_of(seen.host_ranks[i], round, board).local));
      }
      // Equal entries are one run.
      if (round % 4 == 1) CHECK_EQ(seen.runs.size(), 1u);
    }
  });
}

inline void board_entries_are_aligned(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    const Bytes part(static_cast<std::size_t>(5 + communicator.rank()));
    board.post({part, part, part});
    wait_complete(board);
    const auto check_aligned = [](ByteSpan bytes) {
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % 8, 0u);
    };
    const Round round = board.round();
    for (int rank = 0; rank < size; ++rank) {
      check_aligned(run_of(round, rank).common);
      check_aligned(run_of(round, rank).own);
    }
    for (const ByteSpan local : round.locals) check_aligned(local);
  });
}

inline void board_rouses_the_idle(const Layout& layout, int size) {
  std::barrier all(size);
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    for (int round = 0; round < 10; ++round) {
      CHECK(!board.peer_posted());
      all.arrive_and_wait();
      if (communicator.rank() != round % size) {
        while (!board.peer_posted()) board.wait_until(kNever, kSpin);
      }
      board.post({});
      wait_complete(board);
      all.arrive_and_wait();
    }
  });
}

inline void board_names_the_missing(const Layout& layout, int size) {
  const int late = size - 1;
  std::latch seen(late);
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    const auto misses = [&](int rank) {
      CHECK(!board.complete());
      const std::vector<int> missing = board.missing();
      return std::count(missing.begin(), missing.end(), rank) == 1;
    };
    const int rank = communicator.rank();
    if (rank == late) {
      seen.wait();
      board.post({});
    } else {
      board.post({});
      CHECK(!misses(rank));
      // Rank 0 leads its host and so learns the late ranks; others may see only their host.
      while (rank == 0 && !misses(late)) {
        board.wait_until(Clock::now() + std::chrono::milliseconds(5), kSpin);
      }
      seen.count_down();
    }
    wait_complete(board);
    CHECK_EQ(board.missing(), std::vector<int>{});
  });
}

/// The rank with the shortest wait in the round before was the last there; a rank that only
/// answered does not count. All ranks learn the longest wait.
inline void board_knows_who_was_last(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    for (int round = 0; round < 3 * size; ++round) {
      const int last = round % size;
      const auto waited = [&](int rank) {
        if (round >= 2 * size || rank == (last + 1) % size) return LeastWait::kNone;
        return static_cast<std::uint32_t>(10 + (rank - last + size) % size);
      };
      Post post;
      post.waited_us = waited(communicator.rank());
      post.most_us = static_cast<std::uint32_t>(100 * round + communicator.rank());
      board.post(post);
      wait_complete(board);
      const bool is_known = size > 1 && round < 2 * size;
      if (size > 1) CHECK_EQ(board.round().last_of_previous, is_known ? last : -1);
      if (size > 1)
        CHECK_EQ(board.round().most_us, static_cast<std::uint32_t>(100 * round + size - 1));
    }
  });
}

inline void board_wakes(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    board.wake();
    board.wait_until(kNever, kSpin);  // returns for the earlier wake()
    std::atomic<bool> awake{false};
    std::thread waker([&] {
      while (!awake) {
        board.wake();
        std::this_thread::yield();
      }
    });
    board.wait_until(kNever, kSpin);
    awake = true;
    waker.join();
  });
}

/// Registers the suite. Returns true, to initialise a static variable.
inline bool add_board_suite(const Layout& layout) {
  add_for_sizes(layout, "board: all ranks see the same entries", board_rounds);
  add_for_sizes(layout, "board: entries are aligned to 8 bytes", board_entries_are_aligned);
  add_for_sizes(layout, "board: an idle rank learns of a post", board_rouses_the_idle);
  add_for_sizes(layout, "board: a late rank is missing", board_names_the_missing);
  add_for_sizes(layout, "board: all ranks know who was last", board_knows_who_was_last);
  add_for_sizes(layout, "board: wake() ends a wait", board_wakes);
  return true;
}

}  // namespace torch_ring::test
