// SPDX-License-Identifier: Apache-2.0
// scatter_suite: tests that every Communicator's reducescatter and alltoall pass.
#pragma once

#include <numeric>

#include "collective/plan.h"
#include "test_world.h"
#include "values.h"

namespace torch_ring::test {

/// Checks a reducescatter in which rank r's part has part_of(r) elements.
template <class PartOf>
void check_reducescatter(Communicator& communicator, const Reduction& reduction, PartOf&& part_of) {
  const int size = communicator.size();
  std::vector<std::size_t> counts;
  for (int r = 0; r < size; ++r) counts.push_back(part_of(static_cast<std::size_t>(r)));
  const Range own = at(ranges_of(counts), communicator.rank());
  const std::size_t count = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const double factor = reduction.scaling.prescale * reduction.scaling.postscale;

  Elements input = Elements::repeating(reduction.dtype, count, kPeriod, [&](std::size_t i) {
    return value_at(i, communicator.rank(), size, reduction.op);
  });
  const Bytes before = input.bytes();
  const Elements expected = Elements::repeating(reduction.dtype, count, kPeriod, [&](auto i) {
    return factor * reduced_at(i, size, reduction.op, reduction.dtype);
  });
  Elements output(reduction.dtype, own.count);
  communicator.reducescatter(input.data(), output.data(), counts, reduction);
  CHECK(same(input.bytes(), before));
  const std::size_t item = size_of(reduction.dtype);
  const std::byte* const due = expected.bytes().data() + own.begin * item;
  if (same(output.bytes(), Bytes(due, due + own.count * item))) return;
  for (std::size_t i = 0; i < own.count; ++i) {
    if (output.at(i) == expected.at(own.begin + i)) continue;
    fail(__FILE__, __LINE__,
         std::string(name_of(reduction.dtype)) + ' ' + name_of(reduction.op) + ", part of " +
             std::to_string(own.count) + " elements: [" + std::to_string(i) + "] is " +
             shown(output.at(i)) + ", not " + shown(expected.at(own.begin + i)));
  }
}

inline void reducescatter_all(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const auto last = static_cast<std::size_t>(size) - 1;
    for (int dtype = 0; dtype < kNumberCount; ++dtype) {
      const auto check = [&](std::size_t op, auto part_of) {
        const auto turn = (static_cast<std::size_t>(dtype) + op) % kOps.size();
        check_reducescatter(communicator, {static_cast<DType>(dtype), kOps[turn], {}}, part_of);
      };
      check(0, [](std::size_t) { return 0; });
      check(1, [](std::size_t) { return 1; });
      check(2, [](std::size_t rank) { return (rank + 1) % 3 * 333; });
      check(3, [&](std::size_t rank) { return rank == last ? 1000 : 0; });
    }
  });
}

inline void reducescatter_long(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const auto uneven = [](std::size_t rank) { return rank == 1 ? 120'001 : 70 * rank; };
    check_reducescatter(communicator, {}, uneven);
    check_reducescatter(communicator, {DType::kBFloat16, ReduceOp::kMax, {}},
                        [](std::size_t) { return 70'000; });
    check_reducescatter(communicator, {DType::kUInt8, ReduceOp::kSum, {}},
                        [](std::size_t rank) { return 100'000 + rank; });
  });
}

inline void reducescatter_scaled(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      check_reducescatter(communicator,
                          {dtype, ReduceOp::kSum, {.prescale = 4, .postscale = 0.5, .divisor = 1}},
                          [](std::size_t rank) { return 100 + rank; });
    }
    // The average of equal numbers.
    const auto ranks = static_cast<std::size_t>(size);
    const std::vector<std::size_t> counts(ranks, 50);
    Elements input = Elements::repeating(DType::kFloat16, 50 * ranks, 1, [](auto) { return 2047; });
    Elements output(DType::kFloat16, 50);
    communicator.reducescatter(input.data(), output.data(), counts,
                               {DType::kFloat16, ReduceOp::kSum, {.divisor = size}});
    for (std::size_t i = 0; i < output.count(); ++i) CHECK_EQ(output.at(i), 2047);
  });
}

/// Checks an alltoall in which rank `from` sends bytes_from_to(from, to) bytes to rank `to`. The
/// values of the bytes depend on both.
template <class BytesFromTo>
void check_alltoall(Communicator& communicator, BytesFromTo&& bytes_from_to) {
  std::vector<std::size_t> matrix;
  Bytes input;
  Bytes expected;
  for (int from = 0; from < communicator.size(); ++from) {
    for (int to = 0; to < communicator.size(); ++to) {
      matrix.push_back(bytes_from_to(static_cast<std::size_t>(from), static_cast<std::size_t>(to)));
      const auto append_if = [&](bool concerned, Bytes& all) {
        if (!concerned) return;
        const Bytes part = bytes_of(from + 7 * to, matrix.back());
        all.insert(all.end(), part.begin(), part.end());
      };
      append_if(from == communicator.rank(), input);
      append_if(to == communicator.rank(), expected);
    }
  }
  const Bytes before = input;
  Bytes output(expected.size());
  communicator.alltoall(input.data(), output.data(), matrix);
  CHECK(same(input, before));
  CHECK(same(output, expected));
}

inline void alltoall_all(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const auto ranks = static_cast<std::size_t>(size);
    using Index = std::size_t;
    check_alltoall(communicator, [](Index, Index) { return 0; });
    check_alltoall(communicator, [](Index, Index) { return 1; });
    check_alltoall(communicator, [](Index from, Index to) { return (from + 2 * to) % 4 * 501; });
    check_alltoall(communicator, [](Index from, Index to) { return from == to ? 1000 : 0; });
    check_alltoall(communicator, [](Index from, Index to) { return from == 0 ? 70 * to : 0; });
    check_alltoall(communicator,
                   [&](Index from, Index to) { return to == ranks - 1 ? 70 * from : 0; });
    // Longer than a segment: ragged, then all to the next rank.
    check_alltoall(communicator,
                   [](Index from, Index to) { return (from + 2 * to) % 4 * 150'001; });
    check_alltoall(communicator,
                   [&](Index from, Index to) { return to == (from + 1) % ranks ? 600'007 : 0; });
  });
}

/// Registers the suite. Returns true, to initialise a static variable.
inline bool add_scatter_suite(const Layout& layout) {
  add_for_sizes(layout, "reducescatter of every dtype, op and edge", reducescatter_all);
  add_for_sizes(layout, "reducescatter longer than several segments", reducescatter_long);
  add_for_sizes(layout, "reducescatter scales before and after", reducescatter_scaled);
  add_for_sizes(layout, "alltoall of ragged and empty parts", alltoall_all);
  return true;
}

}  // namespace torch_ring::test
