// SPDX-License-Identifier: Apache-2.0
// The bits of a sum do not depend on the tensors that travel with it, or on its path.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "elements.h"
#include "engine_ranks.h"

namespace torch_ring::test::same_bits_test {
namespace {

/// Numbers of very different magnitudes, whose sum depends on the order of the additions.
Elements numbers(DType dtype, std::size_t count, int rank, unsigned seed) {
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
Bytes sum_of(Communicator& communicator, std::size_t count, unsigned seed,
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

void same_bits_at_every_place(const Layout& layout, int size) {
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

std::vector<int> pairs(int size) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank / 2);
  return host_of;
}

[[maybe_unused]] const bool added = [] {
  for (const Layout& layout :
       {Layout{"shm", one_host, {3}}, Layout{"ring", one_rank_a_host, {2, 3, 4, 5}},
        Layout{"ring of 3 connections", one_rank_a_host, {3}, Sockets::kTcp, false, 3},
        Layout{"two hosts", two_hosts, {3, 4, 5}}, Layout{"three hosts", three_hosts, {5}},
        Layout{"pairs", pairs, {10}},
        // Two sections; in the second layout the last rank has no chunk.
        Layout{"sections", one_rank_a_host, {18, 19}}}) {
    add_for_sizes(layout, "the same bits at every place", same_bits_at_every_place);
  }
  return true;
}();

/// Six tensors: inline, inline only if alone, gathered, and longer.
constexpr std::size_t kCounts[] = {20, 800, 3000, 12'000, 20'001, 50'000};
constexpr std::size_t kTensors = std::size(kCounts);

Request request_of(Collective collective, ReduceOp op, int index, Elements& input,
                   Elements& output) {
  Request request;
  request.fingerprint.collective = collective;
  request.fingerprint.op = op;
  request.fingerprint.name = "tensor " + std::to_string(index);
  request.fingerprint.shape = {static_cast<std::int64_t>(input.count())};
  request.input = input.data();
  request.output = output.data();
  return request;
}

/// The results on this rank of asynchronous requests, in a random order and at random times.
std::vector<Bytes> results_of(Rank& rank, std::vector<Elements>& inputs, Collective collective,
                              ReduceOp op, unsigned run) {
  std::mt19937 random(run * 100 + static_cast<unsigned>(rank.rank()));
  std::vector<Elements> outputs;
  for (const std::size_t count : kCounts) outputs.emplace_back(DType::kFloat32, count);
  // Run 0 is one at a time: no fusion, and every small one is alone in its entry.
  std::vector<int> order(kTensors);
  std::iota(order.begin(), order.end(), 0);
  if (run > 0) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::shared_ptr<Work>> works(kTensors);
  for (const int i : order) {
    Request request = request_of(collective, op, i, at(inputs, i), at(outputs, i));
    at(works, i) = rank.engine().submit(std::move(request), Engine::Mode::kAsynchronous);
    if (run == 0) rank.wait(at(works, i));
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  }
  std::vector<Bytes> results;
  for (std::size_t i = 0; i < kTensors; ++i) {
    rank.wait(works[i]);
    results.push_back(outputs[i].bytes());
  }
  return results;
}

void same_bits_in_every_run(Rank& rank, Collective collective, ReduceOp op) {
  std::vector<Elements> inputs;
  for (std::size_t i = 0; i < kTensors; ++i) {
    inputs.push_back(numbers(DType::kFloat32, kCounts[i], rank.rank(), static_cast<unsigned>(i)));
  }
  const std::vector<Bytes> first = results_of(rank, inputs, collective, op, 0);
  for (unsigned run = 1; run < (kSanitized ? 4u : 9u); ++run) {
    const std::vector<Bytes> results = results_of(rank, inputs, collective, op, run);
    for (std::size_t i = 0; i < results.size(); ++i) CHECK(same(results[i], first[i]));
  }
}

const bool kAllreduce = on_all_layouts("the same bits, whatever is fused", [](Rank& rank) {
  same_bits_in_every_run(rank, Collective::kAllreduce, ReduceOp::kAverage);
});

const bool kReducescatter = on_all_layouts("the same bits of a reducescatter", [](Rank& rank) {
  same_bits_in_every_run(rank, Collective::kReducescatter, ReduceOp::kSum);
});

const bool kAdasum = on_all_layouts("the same bits of Adasum, whatever is fused", [](Rank& rank) {
  if (rank.size() == 3) return;  // Adasum needs a power of two
  same_bits_in_every_run(rank, Collective::kAllreduce, ReduceOp::kAdasum);
});

}  // namespace
}  // namespace torch_ring::test::same_bits_test
