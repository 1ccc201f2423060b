// board_suite: tests that every Board passes, whatever its transport.
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

/// The entry that `rank` posts in `round`, which every other rank can compute too.
inline Bytes entry_of(int rank, int round, std::size_t capacity) {
  std::mt19937 random(static_cast<unsigned>(round * 1000 + rank));
  const std::size_t longest = round % 16 == 15 ? capacity : random() % 4 == 0 ? 0 : 200;
  const std::size_t bytes = round % 32 == 31 ? capacity : random() % (longest + 1);
  return Elements::repeating(DType::kUInt8, bytes, 100,
                             [&](std::size_t) { return static_cast<double>(random() % 256); })
      .bytes();
}

inline void wait_complete(Board& board) {
  while (!board.complete()) board.wait_until(kNever, kSpin);
}

inline Bytes entry_at(const Board& board, int rank) {
  const auto entry = board.entry(rank);
  return {entry.begin(), entry.end()};
}

inline void board_rounds(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    std::mt19937 random(static_cast<unsigned>(communicator.rank()));
    for (int round = 0; round < 100; ++round) {
      for (auto pauses = random() % 8; pauses > 0; --pauses) std::this_thread::yield();
      board.post(entry_of(communicator.rank(), round, board.capacity()));
      wait_complete(board);
      CHECK(board.missing().empty());
      for (int rank = 0; rank < size; ++rank) {
        CHECK(same(entry_at(board, rank), entry_of(rank, round, board.capacity())));
      }
    }
  });
}

inline void board_entries_are_aligned(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    board.post(Bytes(static_cast<std::size_t>(5 + communicator.rank())));
    wait_complete(board);
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(board.entry(rank).data()) % 8, 0u);
    }
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
      // Rank 0 leads its host and so learns which ranks are late; others may see only their host.
      while (rank == 0 && !misses(late)) {
        board.wait_until(Clock::now() + std::chrono::milliseconds(5), kSpin);
      }
      seen.count_down();
    }
    wait_complete(board);
    CHECK_EQ(board.missing(), std::vector<int>{});
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
  add_for_sizes(layout, "board: wake() ends a wait", board_wakes);
  return true;
}

}  // namespace torch_ring::test
