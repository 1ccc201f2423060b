// SPDX-License-Identifier: Apache-2.0
// hot_path: the costs of the usual allreduces in rounds, staged segments and barriers, without a
// clock. tests/collectives/test_hot_path.py counts the instructions of torch_ring_hot_path().
#include <algorithm>

#include "collective/shm_communicator.h"
#include "engine/recorder.h"
#include "engine_ranks.h"

namespace torch_ring::test::hot_path_test {

/// 1000 blocking allreduces of 1 KB, and nothing else.
extern "C" __attribute__((noinline)) void torch_ring_hot_path(Rank& rank,
                                                              std::vector<float>& values) {
  for (int i = 0; i < 1000; ++i) {
    rank.allreduce_now(values);
  }
}

namespace {

void count_on_one_rank(Rank& rank) {
  std::vector<float> values = rank.input(256);
  // The flight recorder's ring grows until it has all its entries.
  for (std::size_t i = 0; i < Recorder::kOperations; ++i) rank.allreduce_now(values);
  torch_ring_hot_path(rank, values);
  CHECK(values == rank.input(256));
}

TEST(hot_path_on_one_rank) { run_engines({0}, count_on_one_rank); }

thread_local bool is_profiling = false;

/// As in the bindings: each request passes the function that opens spans (bindings/spans.h), which
/// checks whether a profiler is on in this thread.
TEST(hot_path_with_spans_that_are_off) {
  std::vector<World> worlds = make_worlds({0});
  Planes planes = make_planes({0});
  std::uint64_t spans = 0;
  const std::string transport = "local";
  Rank rank(worlds.front(), std::move(planes.front()), patient(), {},
            [&spans, transport](Request& request) {
              if (is_profiling) spans += request.fingerprint.name.size() + transport.size();
            });
  count_on_one_rank(rank);
  CHECK_EQ(spans, 0u);
}

/// Counts of the events that cost a rank time.
struct Costs {
  std::uint64_t rounds;
  std::uint64_t staged;
  std::uint64_t reduced;
  std::uint64_t barriers;

  explicit Costs(const SegmentHeader& header)
      : rounds(header.posted),
        staged(header.staged),
        reduced(header.reduced),
        barriers(header.barriers) {}
};

/// Runs allreduces of `count` elements on two ranks of a host, in place, and checks their costs.
void check_costs(std::size_t count, bool shared, std::uint64_t staged, std::uint64_t reduced,
                 std::uint64_t barriers) {
  constexpr std::uint64_t kRepeats = 10;
  run_engines({0, 0}, [&](Rank& rank) {
    auto& communicator = dynamic_cast<ShmCommunicator&>(rank.communicator());
    const std::shared_ptr<void> memory = communicator.allocate_shared(count * sizeof(float));
    std::vector<float> own(count, 1.0f);
    float* const data = shared ? static_cast<float*>(memory.get()) : own.data();
    std::fill_n(data, count, 1.0f);

    const auto allreduce = [&] {
      Request request;
      request.fingerprint.shape = {static_cast<std::int64_t>(count)};
      request.input = request.output = data;
      rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
    };
    allreduce();
    const Costs before(communicator.host().own());
    for (std::uint64_t i = 0; i < kRepeats; ++i) allreduce();
    const Costs after(communicator.host().own());

    CHECK_EQ(after.rounds - before.rounds, kRepeats);
    CHECK_EQ(after.staged - before.staged, kRepeats * staged);
    CHECK_EQ(after.reduced - before.reduced, kRepeats * reduced);
    CHECK_EQ(after.barriers - before.barriers, kRepeats * barriers);
    CHECK(std::all_of(data, data + count, [](float value) { return value == 2048.0f; }));
  });
}

constexpr std::size_t kSegment = Slot::kSegmentBytes / sizeof(float);

TEST(hot_path_a_small_tensor_is_inline_in_the_agreement) { check_costs(256, false, 0, 0, 0); }

TEST(hot_path_a_small_tensor_in_shared_memory_is_inline_too) { check_costs(256, true, 0, 0, 0); }

TEST(hot_path_a_one_shot_tensor_is_staged_once) { check_costs(4096, false, 1, 0, 0); }

TEST(hot_path_a_large_tensor_is_staged_in_segments) { check_costs(3 * kSegment, false, 3, 3, 0); }

TEST(hot_path_a_tensor_in_shared_memory_is_never_copied) {
  check_costs(3 * kSegment, true, 0, 0, 1);
}

}  // namespace
}  // namespace torch_ring::test::hot_path_test
