// What every Communicator does, whatever lies beneath.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <latch>
#include <random>

#include "board_suite.h"
#include "collective/adasum.h"
#include "elements.h"

namespace torch_ring::test {

constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

/// Element i on rank r: i * size + r, kept so small that no result leaves the range of any dtype.
inline double value_at(std::size_t i, int rank, int size, ReduceOp op) {
  const std::size_t value = i * static_cast<std::size_t>(size) + static_cast<std::size_t>(rank);
  return op == ReduceOp::kProduct ? 1.0 + static_cast<double>(value % 3)
                                  : static_cast<double>(value % 25);
}

/// The reduction of element i over the ranks.
inline double reduced_at(std::size_t i, int size, ReduceOp op, DType dtype) {
  const auto value = [&](int rank) {
    const double number = value_at(i, rank, size, op);
    return dtype == DType::kBool ? static_cast<double>(number != 0) : number;
  };
  double result = value(0);
  for (int rank = 1; rank < size; ++rank) {
    if (op == ReduceOp::kSum) result += value(rank);
    if (op == ReduceOp::kProduct) result *= value(rank);
    if (op == ReduceOp::kMin) result = std::min(result, value(rank));
    if (op == ReduceOp::kMax) result = std::max(result, value(rank));
  }
  return dtype == DType::kBool ? static_cast<double>(result != 0) : result;
}

inline void check_allreduce(Communicator& communicator, DType dtype, ReduceOp op, std::size_t count,
                            bool in_place) {
  constexpr std::size_t kPeriod = 25 * 3;  // of value_at, whatever the op
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

inline void allreduce_all(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const auto ranks = static_cast<std::size_t>(size);
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, ranks - 1, ranks,
                                        64 * ranks + 1, std::size_t{40'009}}) {
          check_allreduce(communicator, static_cast<DType>(dtype), op, count, count % 2 == 0);
        }
      }
    }
  });
}

inline void allreduce_long(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    // Two ranks: more than a block of the ring, 8 MiB. Otherwise many segments.
    check_allreduce(communicator, DType::kFloat32, ReduceOp::kSum, size == 2 ? 2'100'003 : 500'009,
                    true);
    check_allreduce(communicator, DType::kBFloat16, ReduceOp::kSum, 600'001, true);
    check_allreduce(communicator, DType::kUInt8, ReduceOp::kSum, 1'100'001, false);
  });
}

inline void allreduce_scaled(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    constexpr std::size_t kCount = 1000;
    const Scaling scaling{.prescale = 0.5, .postscale = 8.0, .divisor = size};
    for (const DType dtype :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      Elements data(dtype, kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        data.set(i, value_at(i, communicator.rank(), size, ReduceOp::kSum));
      }
      communicator.allreduce(data.data(), data.data(), kCount, {dtype, ReduceOp::kSum, scaling});
      const double tolerance = size_of(dtype) == 2 ? 1.0 / 256 : 1e-6;  // half a unit of bfloat16
      for (std::size_t i = 0; i < kCount; ++i) {
        const double exact = reduced_at(i, size, ReduceOp::kSum, dtype) * 4 / size;
        CHECK(std::fabs(data.at(i) - exact) <= tolerance * exact);
      }
    }
  });
}

inline void allreduce_accumulates_in_float32(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    // In float16, 2048 + 1 is 2048: whoever rounds in between loses the ones.
    constexpr std::size_t kCount = 1000;
    Elements data(DType::kFloat16, kCount);
    const double largest = 2048 - (size - 1) % 2;  // the sum is even, so float16 can hold it
    for (std::size_t i = 0; i < kCount; ++i) {
      const bool chosen =
          i % static_cast<std::size_t>(size) == static_cast<std::size_t>(communicator.rank());
      data.set(i, chosen ? largest : 1);
    }
    communicator.allreduce(data.data(), data.data(), kCount, {DType::kFloat16, ReduceOp::kSum, {}});
    for (std::size_t i = 0; i < kCount; ++i) CHECK_EQ(data.at(i), largest + size - 1);
  });
}

inline void allreduce_same_bits(const Layout& layout, int size) {
  constexpr std::size_t kCount = 200'003;
  std::vector<Bytes> results[2];
  for (auto& result : results) {
    result.resize(static_cast<std::size_t>(size));
    run_world(layout, size, [&](Communicator& communicator, Abort&) {
      std::mt19937 random(static_cast<unsigned>(communicator.rank()));
      std::normal_distribution<double> normal;
      Elements data(DType::kFloat32, kCount);
      for (std::size_t i = 0; i < kCount; ++i) data.set(i, normal(random));
      communicator.allreduce(data.data(), data.data(), kCount,
                             {DType::kFloat32, ReduceOp::kSum, {.divisor = size}});
      result[static_cast<std::size_t>(communicator.rank())] = data.bytes();
    });
  }
  for (const auto& result : results) {
    for (const auto& bytes : result) CHECK(same(bytes, results[0][0]));
  }
}

/// Bytes that differ from rank to rank, and from place to place.
inline Bytes bytes_of(int rank, std::size_t count) {
  return Elements::repeating(
             DType::kUInt8, count, 251,
             [&](std::size_t i) {
               return static_cast<double>((i + 50 * static_cast<std::size_t>(rank)) % 251);
             })
      .bytes();
}

inline void broadcast_from_every_root(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const std::size_t bytes : {0, 1, 1000, 1'300'001}) {
      for (int root = 0; root < size; ++root) {
        Bytes data = bytes_of(communicator.rank(), bytes);
        communicator.broadcast(data.data(), bytes, root);
        CHECK(same(data, bytes_of(root, bytes)));
      }
    }
  });
}

inline void allgather_ragged(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const std::size_t scale : {0, 1, 500, 140'001}) {
      for (int empty = 0; empty <= size; ++empty) {  // at `size` there is none
        std::vector<std::size_t> bytes;
        Bytes expected;
        for (int rank = 0; rank < size; ++rank) {
          bytes.push_back(rank == empty ? 0 : scale * static_cast<std::size_t>(rank + 1));
          const auto part = bytes_of(rank, bytes.back());
          expected.insert(expected.end(), part.begin(), part.end());
        }
        const int rank = communicator.rank();
        const auto input = bytes_of(rank, bytes[static_cast<std::size_t>(rank)]);
        Bytes output(expected.size());
        communicator.allgather(input.data(), output.data(), bytes);
        CHECK(same(output, expected));
      }
    }
  });
}

/// Bytes that say from whom to whom they go.
inline Bytes parcel_of(int from, int to, std::size_t count) {
  return bytes_of(7 * from + to, count);
}

inline void alltoall_ragged(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const int rank = communicator.rank();
    for (const std::size_t scale : {0, 1, 500, 90'001}) {
      std::vector<std::size_t> bytes;
      Bytes input;
      Bytes expected;
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          bytes.push_back(static_cast<std::size_t>((from + 2 * to) % 4) * scale);
          const Bytes parcel = parcel_of(from, to, bytes.back());
          if (from == rank) input.insert(input.end(), parcel.begin(), parcel.end());
          if (to == rank) expected.insert(expected.end(), parcel.begin(), parcel.end());
        }
      }
      Bytes output(expected.size());
      communicator.alltoall(input.data(), output.data(), bytes);
      CHECK(same(output, expected));
    }
  });
}

inline void reducescatter_ragged(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt32}) {
      for (const std::size_t scale : {0, 1, 500, 70'001}) {
        std::vector<std::size_t> counts;
        std::size_t before = 0;
        std::size_t count = 0;
        for (int rank = 0; rank < size; ++rank) {
          counts.push_back(static_cast<std::size_t>((rank + 1) % 3) * scale);
          if (rank < communicator.rank()) before += counts.back();
          count += counts.back();
        }
        const auto value = [&](std::size_t i) {
          return value_at(i, communicator.rank(), size, ReduceOp::kSum);
        };
        const Elements before_all = Elements::repeating(dtype, count, 75, value);
        Elements input = before_all;
        Elements output(dtype, counts[static_cast<std::size_t>(communicator.rank())]);
        communicator.reducescatter(input.data(), output.data(), counts,
                                   {dtype, ReduceOp::kSum, {.postscale = 2.0}});
        CHECK(same(input.bytes(), before_all.bytes()));
        for (std::size_t i = 0; i < output.count(); i += 1 + output.count() / 100) {
          Elements expected(dtype, 1);
          expected.set(0, 2 * reduced_at(before + i, size, ReduceOp::kSum, dtype));
          CHECK_EQ(output.at(i), expected.at(0));
        }
      }
    }
  });
}

/// The adaptive sum of what the ranks first, first + 1, ... have.
inline std::vector<double> adaptive_sum(const std::vector<std::vector<double>>& vectors,
                                        std::size_t first, std::size_t ranks) {
  if (ranks == 1) return vectors[first];
  const auto a = adaptive_sum(vectors, first, ranks / 2);
  const auto b = adaptive_sum(vectors, first + ranks / 2, ranks / 2);
  double ab = 0;
  double aa = 0;
  double bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  std::vector<double> sum;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum.push_back((aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] +
                  (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i]);
  }
  return sum;
}

inline void adasum_of_tensors(const Layout& layout, int size) {
  const std::vector<std::size_t> counts{1, 200, 0, 5'001, 3};
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    std::vector<Bytes> results(static_cast<std::size_t>(size));
    run_world(layout, size, [&](Communicator& communicator, Abort&) {
      std::vector<Elements> inputs;
      const std::size_t all = 5'205;
      for (int rank = 0; rank < size; ++rank) {
        std::mt19937 random(static_cast<unsigned>(rank));
        std::normal_distribution<double> normal;
        Elements input(dtype, all);
        for (std::size_t i = 0; i < all; ++i) {
          input.set(i, i > 0 && i <= 200 && rank == 1 ? 0.0 : normal(random));  // one is all zeros
        }
        inputs.push_back(std::move(input));
      }
      Elements data = inputs[static_cast<std::size_t>(communicator.rank())];
      if (std::popcount(static_cast<unsigned>(size)) != 1) {
        CHECK_THROWS(adasum(communicator, data.data(), counts, dtype), ErrorKind::kInvalidArgument,
                     "power of two");
        return;
      }
      adasum(communicator, data.data(), counts, dtype);
      results[static_cast<std::size_t>(communicator.rank())] = data.bytes();
      const double tolerance = dtype == DType::kBFloat16  ? 1.0 / 256
                               : dtype == DType::kFloat32 ? 1e-5
                                                          : 1e-12;
      std::size_t begin = 0;
      for (const std::size_t count : counts) {
        std::vector<std::vector<double>> vectors;
        for (const Elements& input : inputs) {
          vectors.emplace_back();
          for (std::size_t i = 0; i < count; ++i) vectors.back().push_back(input.at(begin + i));
        }
        const std::vector<double> sum = adaptive_sum(vectors, 0, vectors.size());
        for (std::size_t i = 0; i < count; ++i) {
          CHECK(std::fabs(data.at(begin + i) - sum[i]) <= tolerance * (1 + std::fabs(sum[i])));
        }
        begin += count;
      }
    });
    for (const Bytes& result : results) CHECK(same(result, results[0]));
  }
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
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    Board& board = communicator.board();
    for (int round = 0; round < 20; ++round) {
      board.post(entry_of(communicator.rank(), round, 1000));
      wait_complete(board);
      check_allreduce(communicator, DType::kFloat32, ReduceOp::kSum, round % 2 ? 100'003 : 10,
                      true);
      std::byte token{static_cast<unsigned char>(communicator.rank())};
      communicator.broadcast(&token, 1, round % size);
      CHECK_EQ(static_cast<int>(token), round % size);
      if (round % 3 == 0) communicator.barrier();
      CHECK_EQ(entry_at(board, size - 1), entry_of(size - 1, round, 1000));
    }
  });
}

inline void silence_is_a_timeout(const Layout& layout, int size) {
  EngineConfig config;
  config.timeout = std::chrono::milliseconds(50);
  std::latch failed(size - 1);
  run_world(
      layout, size,
      [&](Communicator& communicator, Abort&) {
        if (communicator.rank() == 0) return failed.wait();
        Elements data(DType::kFloat32, 100'000);
        const auto allreduce = [&] {
          communicator.allreduce(data.data(), data.data(), data.count(), {});
        };
        CHECK_THROWS(allreduce(), ErrorKind::kTimeout, "no progress for 0.05");
        failed.arrive_and_wait();
      },
      config);
}

inline void an_abort_ends_a_wait(const Layout& layout, int size) {
  std::latch failed(size - 1);
  run_world(layout, size, [&](Communicator& communicator, Abort& abort) {
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

/// Registers the suite, and the board's; returns true, to initialise a static with.
inline bool add_communicator_suite(const Layout& layout) {
  const auto add = [&](const char* name, void (*body)(const Layout&, int)) {
    add_for_sizes(layout, name, body);
  };
  add("allreduce of every dtype, op and edge", allreduce_all);
  add("allreduce longer than many segments", allreduce_long);
  add("allreduce scales before and after", allreduce_scaled);
  add("allreduce accumulates 16-bit floats in float32", allreduce_accumulates_in_float32);
  add("allreduce gives the same bits on all ranks and runs", allreduce_same_bits);
  add("broadcast from every root", broadcast_from_every_root);
  add("allgather of ragged and empty parts", allgather_ragged);
  add("alltoall of ragged and empty parts", alltoall_ragged);
  add("reducescatter of ragged and empty parts", reducescatter_ragged);
  add("adasum is the pairwise formula", adasum_of_tensors);
  add("barrier holds all until the last", barrier_holds_all);
  add("agreement and data in turns", everything_in_turns);
  Layout with_peers = layout;
  std::erase(with_peers.sizes, 1);
  add_for_sizes(with_peers, "silence is a timeout", silence_is_a_timeout);
  add_for_sizes(with_peers, "an abort ends a wait with its cause", an_abort_ends_a_wait);
  return add_board_suite(layout);
}

}  // namespace torch_ring::test
