// SPDX-License-Identifier: Apache-2.0
// The bits of a sum do not depend on the tensors that travel with it.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "communicator_suite.h"
#include "engine_ranks.h"

namespace torch_ring::test::same_bits_test {
namespace {

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
