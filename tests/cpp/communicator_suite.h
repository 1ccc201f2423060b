// SPDX-License-Identifier: Apache-2.0
// communicator_suite: tests that every Communicator passes.
#pragma once

#include <array>
#include <atomic>
#include <latch>
#include <random>

#include "board_suite.h"
#include "rooted_suite.h"
#include "scatter_suite.h"
#include "values.h"

namespace torch_ring::test {

inline void check_allreduce(Communicator& communicator, DType dtype, ReduceOp op, std::size_t count,
                            bool in_place) {
  const int size = communicator.size();
  const Elements before = Elements::repeating(dtype, count, kPeriod, [&](std::size_t i) {
    return value_at(i, communicator.rank(), size, op);
  });
  const Elements expected = Elements::repeating(
      dtype, count, kPeriod, [&](std::size_t i) { return reduced_at(i, size, op, dtype); });
  Elements input = before;
  Elements other(dtype, in_place ? 0 : count);
  Elements& output = in_place ? input : other;
  communicator.allreduce(input.data(), output.data(), count, {dtype, op, {}});
  CHECK(in_place || same(input.bytes(), before.bytes()));
  if (same(output.bytes(), expected.bytes())) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (output.at(i) == expected.at(i)) continue;
    fail(__FILE__, __LINE__,
         std::string(name_of(dtype)) + ' ' + name_of(op) + ", " + std::to_string(count) +
             " elements: [" + std::to_string(i) + "] is " + shown(output.at(i)) + ", not " +
             shown(expected.at(i)));
  }
}

// Under sanitizers three dtypes are enough: reduce_test tests the arithmetic of all, without
// threads.
constexpr int kDTypeStep = kSanitized ? 4 : 1;
// Under sanitizers long data is half as long, still more than two segments of every dtype.
constexpr std::size_t kShare = kSanitized ? 2 : 1;

// Elements below and above a ring's bound of 64 KiB: gathered on every rank, and sent around the
// ring.
constexpr std::array<std::size_t, 2> kShortAndLong{1000, 40'009};

inline void allreduce_all(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (int dtype = 0; dtype < kNumberCount; dtype += kDTypeStep) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t count : counts_for(size)) {
          check_allreduce(communicator, static_cast<DType>(dtype), op, count, count % 2 == 0);
        }
      }
    }
  });
}

inline void allreduce_long(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    // Two ranks: more than a round of the ring, 2 MiB. Otherwise many segments.
    check_allreduce(communicator, DType::kFloat32, ReduceOp::kSum,
                    (size == 2 ? 2'100'003 : 500'009) / kShare, true);
    check_allreduce(communicator, DType::kBFloat16, ReduceOp::kSum, 600'001 / kShare, true);
    check_allreduce(communicator, DType::kUInt8, ReduceOp::kSum, 1'100'001 / kShare, false);
  });
}

inline void allreduce_scaled(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const Scaling scaling{.prescale = 0.5, .postscale = 8.0, .divisor = size};
    for (const DType dtype :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      for (const std::size_t count : kShortAndLong) {
        Elements data(dtype, count);
        for (std::size_t i = 0; i < count; ++i) {
          data.set(i, value_at(i, communicator.rank(), size, ReduceOp::kSum));
        }
        communicator.allreduce(data.data(), data.data(), count, {dtype, ReduceOp::kSum, scaling});
        const double tolerance = size_of(dtype) == 2 ? 1.0 / 256 : 1e-6;  // half a bfloat16 unit
        for (std::size_t i = 0; i < count; ++i) {
          const double exact = reduced_at(i, size, ReduceOp::kSum, dtype) * 4 / size;
          CHECK(std::fabs(data.at(i) - exact) <= tolerance * exact);
        }
      }
    }
  });
}

inline void allreduce_accumulates_in_float32(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    // In float16, 2048 + 1 is 2048: intermediate rounding loses the ones.
    const double largest = 2048 - (size - 1) % 2;  // the sum is even, so float16 can hold it
    for (const std::size_t count : kShortAndLong) {
      Elements data(DType::kFloat16, count);
      for (std::size_t i = 0; i < count; ++i) {
        const bool chosen =
            i % static_cast<std::size_t>(size) == static_cast<std::size_t>(communicator.rank());
        data.set(i, chosen ? largest : 1);
      }
      communicator.allreduce(data.data(), data.data(), count,
                             {DType::kFloat16, ReduceOp::kSum, {}});
      for (std::size_t i = 0; i < count; ++i) CHECK_EQ(data.at(i), largest + size - 1);
    }
  });
}

/// Numbers of very different magnitudes, whose sum depends on the order of the additions.
inline Elements numbers(DType dtype, std::size_t count, int rank, unsigned seed) {
  std::mt19937 random(seed * 1000 + static_cast<unsigned>(rank));
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> magnitude(-4, 4);
  Elements elements(dtype, count);
  for (std::size_t i = 0; i < count; ++i) {
    elements.set(i, normal(random) * std::pow(10.0, magnitude(random)));
  }
  return elements;
}

/// The sum of all ranks' numbers, in this communicator's order of additions.
inline Bytes sum_of(Communicator& communicator, std::size_t count, unsigned seed,
                    const Reduction& reduction) {
  std::vector<Elements> inputs;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    inputs.push_back(numbers(reduction.dtype, count, rank, seed));
  }
  for (Elements& input : inputs) pointers.push_back(input.data());
  Elements sum(reduction.dtype, count);
  communicator.reduce_inputs(pointers, sum.data(), count, reduction);
  return sum.bytes();
}

/// The bits of a sum do not depend on the rank, on the elements around it, or on its path.
inline void same_bits_at_every_place(const Layout& layout, int size) {
  constexpr std::size_t kCount = 501;
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      const Reduction reduction{dtype, ReduceOp::kSum, {.prescale = 0.3, .divisor = size}};
      const Bytes expected = sum_of(communicator, kCount, 1, reduction);
      const Elements own = numbers(dtype, kCount, communicator.rank(), 1);
      // Alone, and in a longer buffer: short and gathered, long, and in more than one round.
      for (const std::size_t before : {0u, 7u, 3001u, 50'000u, 1'000'000u}) {
        if (before == 1'000'000 && (size != 3 || kSanitized || dtype != DType::kFloat32)) continue;
        Elements all(dtype, before == 0 ? kCount : before + kCount + before / 3);
        std::byte* const place = all.data() + before * size_of(dtype);
        std::memcpy(place, own.bytes().data(), own.bytes().size());
        communicator.allreduce(all.data(), all.data(), all.count(), reduction);
        CHECK(std::memcmp(place, expected.data(), expected.size()) == 0);
      }
      // As this rank's part, by rank.
      const std::vector<std::size_t> counts(static_cast<std::size_t>(size), kCount);
      const Elements parts =
          numbers(dtype, kCount * static_cast<std::size_t>(size), communicator.rank(), 2);
      const Bytes sums = sum_of(communicator, parts.count(), 2, reduction);
      Elements part(dtype, kCount);
      communicator.reducescatter(parts.bytes().data(), part.data(), counts, reduction);
      const std::size_t begin = static_cast<std::size_t>(communicator.rank()) * part.bytes().size();
      CHECK(std::memcmp(part.data(), sums.data() + begin, part.bytes().size()) == 0);
    }
  });
}

inline void broadcast_from_every_root(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    // More than four hosts: along a tree, scattered, and along a chain.
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{1000}, 300'001 / kShare,
          (size > 4 ? 4'500'001 : 1'300'001) / kShare}) {
      for (const int root : roots_of(size)) {
        Bytes data = bytes_of(communicator.rank(), bytes);
        communicator.broadcast(data.data(), bytes, root);
        CHECK(same(data, bytes_of(root, bytes)));
      }
    }
  });
}

/// Checks an allgather in which rank r gives bytes[r] bytes.
inline void check_allgather(Communicator& communicator, const std::vector<std::size_t>& bytes) {
  const int rank = communicator.rank();
  const Bytes input = bytes_of(rank, at(bytes, rank));
  const Bytes expected = parts_of(bytes);
  Bytes output(expected.size());
  communicator.allgather(input.data(), output.data(), bytes);
  CHECK(same(output, expected));
}

inline void allgather_ragged(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const std::size_t scale :
         {std::size_t{0}, std::size_t{1}, std::size_t{500}, 140'001 / kShare}) {
      for (const int empty : {0, size - 1, size}) {  // at `size` no rank is empty
        std::vector<std::size_t> bytes;
        for (int rank = 0; rank < size; ++rank) {
          bytes.push_back(rank == empty ? 0 : scale * static_cast<std::size_t>(rank % 4 + 1));
        }
        check_allgather(communicator, bytes);
      }
    }
  });
}

inline void barrier_holds_all(const Layout& layout, int size) {
  std::atomic<int> entered{0};
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (int round = 1; round <= 50; ++round) {
      ++entered;
      communicator.barrier();
      CHECK(entered >= round * size);
    }
  });
}

inline void everything_in_turns(const Layout& layout, int size) {
  run_world(layout, size, [&](HostCommunicator& communicator, Abort&) {
    Board& board = communicator.board();
    for (int round = 0; round < (kSanitized ? 9 : 20); ++round) {
      board.post(entry_of(communicator.rank(), round, board).post());
      wait_complete(board);
      check_allreduce(communicator, DType::kFloat32, ReduceOp::kSum,
                      round % 2 ? 300'003 / kShare : 10, true);
      std::byte token{static_cast<unsigned char>(communicator.rank())};
      communicator.broadcast(&token, 1, round % size);
      CHECK_EQ(static_cast<int>(token), round % size);
      const std::size_t unit = round % 8 == 0 ? 40'000 : 1;  // 40'000: more than a segment
      check_alltoall(communicator,
                     [&](std::size_t from, std::size_t to) { return (from + to) % 2 * 8 * unit; });
      check_reducescatter(communicator, {}, [&](std::size_t peer) { return peer % 2 * unit; });
      if (round % 3 == 0) communicator.barrier();
      CHECK(same(copy_of(run_of(board.round(), size - 1).common),
                 entry_of(size - 1, round, board).common));
    }
  });
}

/// Rank 0 is silent in each collective, of which it is the root of some. A rank other than the last
/// may be done with a gather or a reduce to the last.
inline void silence_is_a_timeout(const Layout& layout, int size) {
  EngineConfig config;
  config.timeout = std::chrono::milliseconds(50);
  constexpr std::size_t kCount = 100'000;
  const Reduction bytes{DType::kUInt8, ReduceOp::kSum, {}};
  const std::vector<std::size_t> parts(static_cast<std::size_t>(size), kCount);
  const std::vector<std::size_t> matrix(parts.size() * parts.size(), kCount);
  const int last = size - 1;
  using Collective = std::function<void(Communicator&, std::byte * input, std::byte * output)>;
  const std::pair<Collective, bool> collectives[] = {
      // and whether it needs only the last rank
      {[&](auto& all, auto* in, auto* out) { all.allreduce(in, out, kCount, bytes); }, false},
      {[&](auto& all, auto* in, auto* out) { all.reducescatter(in, out, parts, bytes); }, false},
      {[&](auto& all, auto* in, auto* out) { all.alltoall(in, out, matrix); }, false},
      {[&](auto& all, auto* in, auto* out) { all.scatter(in, out, parts, 0); }, false},
      {[&](auto& all, auto* in, auto* out) { all.gather(in, out, parts, last); }, true},
      {[&](auto& all, auto* in, auto* out) { all.reduce_to(last, in, out, kCount, bytes); }, true},
  };
  for (const auto& [run, to_last] : collectives) {
    std::latch ended(last);
    run_world(
        layout, size,
        [&, &run = run, to_last = to_last](Communicator& communicator, Abort&) {
          if (communicator.rank() == 0) return ended.wait();
          Bytes input(kCount * parts.size());
          Bytes output(input.size());
          std::string error = "none";
          try {
            run(communicator, input.data(), output.data());
          } catch (const Error& timeout) {
            CHECK(timeout.kind() == ErrorKind::kTimeout);
            error = timeout.what();
          }
          const bool may_be_done = to_last && communicator.rank() != last;
          CHECK(may_be_done || error.find("no progress for 0.05") != std::string::npos);
          ended.arrive_and_wait();
        },
        config);
  }
}

inline void an_abort_ends_a_wait(const Layout& layout, int size) {
  std::latch failed(size - 1);
  run_world(layout, size, [&](HostCommunicator& communicator, Abort& abort) {
    if (communicator.rank() == 0) return failed.wait();
    std::thread watchdog([&] {
      abort.raise(Error(ErrorKind::kPeerLost, "rank 0 was killed"));
      communicator.board().wake();
    });
    Elements data(DType::kFloat32, 100'000);
    const auto allreduce = [&] {
      communicator.allreduce(data.data(), data.data(), data.count(), {});
    };
    CHECK_THROWS(allreduce(), ErrorKind::kPeerLost, "rank 0 was killed");
    watchdog.join();
    failed.arrive_and_wait();
  });
}

/// Registers the suite, and the board's. Returns true, to initialise a static variable.
inline bool add_communicator_suite(const Layout& layout) {
  const auto add = [&](const char* name, void (*body)(const Layout&, int)) {
    add_for_sizes(layout, name, body);
  };
  add("allreduce of every dtype, op and edge", allreduce_all);
  add("allreduce longer than many segments", allreduce_long);
  add("allreduce scales before and after", allreduce_scaled);
  add("allreduce accumulates 16-bit floats in float32", allreduce_accumulates_in_float32);
  add("the same bits at every place", same_bits_at_every_place);
  add("broadcast from every root", broadcast_from_every_root);
  add("allgather of ragged and empty parts", allgather_ragged);
  add("barrier holds all until the last", barrier_holds_all);
  add("agreement and data in turns", everything_in_turns);
  Layout with_peers = layout;
  std::erase(with_peers.sizes, 1);
  add_for_sizes(with_peers, "an abort ends a wait with its cause", an_abort_ends_a_wait);
  return add_scatter_suite(layout) && add_rooted_suite(layout) && add_board_suite(layout);
}

}  // namespace torch_ring::test
