// SPDX-License-Identifier: Apache-2.0
// rooted_suite: tests that every Communicator's reduce_to, gather and scatter pass.
#pragma once

#include <numeric>
#include <random>

#include "collective/plan.h"
#include "test_world.h"
#include "values.h"

namespace torch_ring::test {

/// Checks a reduce, whose result only the root gets: the others' outputs and all inputs stay
/// unchanged.
inline void check_reduce(Communicator& communicator, const Reduction& reduction, std::size_t count,
                         int root, bool in_place) {
  const int size = communicator.size();
  const auto& [dtype, op, scaling] = reduction;
  const double factor = scaling.prescale * scaling.postscale;
  const Elements before = Elements::repeating(dtype, count, kPeriod, [&](std::size_t i) {
    return value_at(i, communicator.rank(), size, op);
  });
  const Elements result = Elements::repeating(dtype, count, kPeriod, [&](std::size_t i) {
    return factor * reduced_at(i, size, op, dtype);
  });
  const bool at_root = communicator.rank() == root;
  Elements input = before;
  const Elements untouched = Elements::repeating(dtype, count, 1, [](std::size_t) { return 1; });
  Elements other = untouched;
  Elements& output = in_place ? input : other;
  communicator.reduce_to(root, input.data(), output.data(), count, reduction);
  const Bytes& expected = (at_root ? result : in_place ? before : untouched).bytes();
  if (!in_place) CHECK(same(input.bytes(), before.bytes()));
  if (same(output.bytes(), expected)) return;
  fail(__FILE__, __LINE__,
       std::string("a wrong reduce of ") + std::to_string(count) + ' ' + name_of(dtype) + ' ' +
           name_of(op) + " to rank " + std::to_string(root) + (in_place ? " in place" : ""));
}

/// Counts of elements: none, one, fewer than ranks, not divisible by them, short and long ones.
inline std::vector<std::size_t> counts_for(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return {0, 1, ranks - 1, ranks, 64 * ranks + 1, 40'009};
}

/// The roots for tests of every root: many ranks have enough with some.
inline std::vector<int> roots_of(int size) {
  std::vector<int> roots;
  for (int root = 0; root < size; root += size > 5 ? 3 : 1) roots.push_back(root);
  return roots;
}

inline void reduce_of_every_kind(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    int turn = 0;
    for (int dtype = 0; dtype < kNumberCount; dtype += kSanitized ? 4 : 1) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t count : counts_for(size)) {
          check_reduce(communicator, {static_cast<DType>(dtype), op, {}}, count, turn++ % size,
                       count % 2 == 0);
        }
      }
    }
    const Scaling scaling{.prescale = 4, .postscale = 0.5, .divisor = 1};
    for (const int root : roots_of(size)) {
      for (const std::size_t count : counts_for(size)) {
        check_reduce(communicator, {DType::kFloat16, ReduceOp::kSum, scaling}, count, root, true);
      }
    }
  });
}

inline void reduce_long(const Layout& layout, int size) {
  constexpr std::size_t kShare = kSanitized ? 2 : 1;
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const int root : roots_of(size)) {
      // More than a round of a ring of two and many segments.
      check_reduce(communicator, {}, 600'003 / kShare, root, root % 2 == 0);
    }
    check_reduce(communicator, {DType::kBFloat16, ReduceOp::kMax, {}}, 600'001 / kShare, size - 1,
                 false);
  });
}

/// Numbers whose sum depends on the order of the additions: the root's bits must be those of an
/// allreduce.
inline void reduce_has_the_bits_of_an_allreduce(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      for (const std::size_t count : {std::size_t{100}, std::size_t{40'009}}) {
        std::mt19937 random(static_cast<unsigned>(communicator.rank()));
        std::uniform_int_distribution<int> whole(0, 2000);
        Elements input = Elements::repeating(dtype, count, 1009, [&](std::size_t) {
          return dtype == DType::kFloat16 ? whole(random) : whole(random) / 3e3;
        });
        const Reduction reduction{dtype, ReduceOp::kSum, {.prescale = 0.3, .divisor = size}};
        Elements everywhere(dtype, count);
        communicator.allreduce(input.data(), everywhere.data(), count, reduction);
        for (const int root : roots_of(size)) {
          Elements there(dtype, count);
          communicator.reduce_to(root, input.data(), there.data(), count, reduction);
          if (communicator.rank() == root) CHECK(same(there.bytes(), everywhere.bytes()));
        }
      }
    }
  });
}

/// The parts of all ranks, one after the other; rank r's has bytes[r] bytes.
inline Bytes parts_of(const std::vector<std::size_t>& bytes) {
  Bytes all;
  all.reserve(std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}));
  for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
    const Bytes part = bytes_of(static_cast<int>(rank), bytes[rank]);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// Checks a gather and a scatter of parts of these lengths, with separate buffers and in place.
inline void check_gather_and_scatter(Communicator& communicator,
                                     const std::vector<std::size_t>& bytes, int root) {
  const bool at_root = communicator.rank() == root;
  const Bytes all = parts_of(bytes);
  const Range own = at(ranges_of(bytes), communicator.rank());
  const Bytes part = bytes_of(communicator.rank(), own.count);
  const Bytes untouched(all.size(), std::byte{0xee});

  Bytes gathered = untouched;
  communicator.gather(part.data(), gathered.data(), bytes, root);
  CHECK(same(gathered, at_root ? all : untouched));
  Bytes scattered(own.count);
  communicator.scatter(at_root ? all.data() : nullptr, scattered.data(), bytes, root);
  CHECK(same(scattered, part));

  Bytes in_place = untouched;
  if (!part.empty()) std::copy(part.begin(), part.end(), in_place.data() + own.begin);
  communicator.gather(in_place.data() + own.begin, at_root ? in_place.data() : nullptr, bytes,
                      root);
  if (at_root) CHECK(same(in_place, all));
  communicator.scatter(in_place.data(), in_place.data() + own.begin, bytes, root);
  const std::byte* const due = in_place.data() + own.begin;
  CHECK(same(Bytes(due, due + own.count), part));
}

inline void gather_and_scatter(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const int root : roots_of(size)) {
      for (const std::size_t scale : {0, 1, 1000, kSanitized ? 150'001 : 600'007}) {
        check_gather_and_scatter(
            communicator, std::vector<std::size_t>(static_cast<std::size_t>(size), scale), root);
      }
      for (const std::size_t unit : {1, 90'001}) {  // ragged; 90'001: up to several segments
        std::vector<std::size_t> bytes;
        for (int rank = 0; rank < size; ++rank) {
          bytes.push_back(static_cast<std::size_t>((rank + root) % 4) * unit);
        }
        check_gather_and_scatter(communicator, bytes, root);
      }
    }
  });
}

/// Ranks that wait for no other rank run ahead; their staged or sent data must wait for the others.
inline void rooted_in_turns(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    const auto ranks = static_cast<std::size_t>(size);
    for (int round = 0; round < (kSanitized ? 12 : 40); ++round) {
      const int root = round % size;
      const std::vector<std::size_t> bytes(ranks, round % 5 == 0 ? 300'000 : 100);
      const Bytes all = parts_of(bytes);
      const Bytes part = bytes_of(communicator.rank(), bytes[0]);
      Bytes gathered(communicator.rank() == root ? all.size() : 0);
      communicator.gather(part.data(), gathered.data(), bytes, root);
      if (communicator.rank() == root) CHECK(same(gathered, all));
      check_reduce(communicator, {}, round % 3 == 0 ? 30'011 : 10, (root + 1) % size, false);
      Bytes scattered(bytes[0]);
      communicator.scatter(all.data(), scattered.data(), bytes, root);
      CHECK(same(scattered, part));
      check_reduce(communicator, {}, 10, root, true);
      std::byte token{static_cast<unsigned char>(communicator.rank())};
      communicator.broadcast(&token, 1, root);
      CHECK_EQ(static_cast<int>(token), root);
    }
  });
}

/// Registers the suite. Returns true, to initialise a static variable.
inline bool add_rooted_suite(const Layout& layout) {
  add_for_sizes(layout, "reduce of every dtype, op, edge and root", reduce_of_every_kind);
  add_for_sizes(layout, "reduce longer than several segments", reduce_long);
  add_for_sizes(layout, "reduce has the bits of an allreduce", reduce_has_the_bits_of_an_allreduce);
  add_for_sizes(layout, "gather and scatter of equal and ragged parts", gather_and_scatter);
  add_for_sizes(layout, "collectives with a root in turns", rooted_in_turns);
  return true;
}

}  // namespace torch_ring::test
