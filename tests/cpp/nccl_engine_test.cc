// SPDX-License-Identifier: Apache-2.0
// Engine with a device: NCCL's double, and host memory whose copies run on the double's streams.
#include "nccl_ranks.h"

namespace torch_ring::test::nccl_engine_test {
namespace {

TEST(device_and_host_requests_are_matched_by_name) {
  for (const int size : {1, 2, 3}) {
    run_with_device(size, [](Rank& rank) {
      constexpr std::size_t kRequests = 12;
      std::vector<std::vector<float>> values(kRequests);
      std::vector<std::shared_ptr<Work>> works(kRequests);
      std::vector<std::atomic<bool>> finished(kRequests);
      for (std::size_t i = 0; i < kRequests; ++i) {
        const std::size_t index = (i + static_cast<std::size_t>(5 * rank.rank())) % kRequests;
        const std::string name = std::to_string(index);
        values[index] = rank.input(index * 300);
        works[index] = index % 3 == 0 ? rank.allreduce(values[index], name)
                                      : submit(rank, values[index], name, finished[index]);
      }
      for (std::size_t i = 0; i < kRequests; ++i) {
        rank.wait(works[i]);
        CHECK(finished[i] == (i % 3 != 0));
      }
      rank.engine().close();  // waits for the stream
      for (std::size_t i = 0; i < kRequests; ++i) {
        CHECK(values[i] == Rank::sums(i * 300, rank.size()));
      }
    });
  }
}

TEST(same_name_on_device_and_host_is_a_mismatch) {
  run_with_device(2, [](Rank& rank) {
    std::vector<float> values(3, 1.0f);
    std::atomic<bool> finished{false};
    const auto work =
        rank.rank() == 0 ? rank.allreduce(values, "m") : submit(rank, values, "m", finished);
    CHECK_THROWS(rank.wait(work), ErrorKind::kMismatch,
                 "rank 1: allreduce 'm' float32 [3] Sum on cuda");
    CHECK(!finished);
  });
}

TEST(error_names_the_rank_without_nccl_and_host_requests_still_work) {
  run_with_device(
      3,
      [](Rank& rank) {
        std::vector<float> values(3, 1.0f);
        std::atomic<bool> finished{false};
        for (int repeat = 0; repeat < 2; ++repeat) {
          const auto work = submit(rank, values, "", finished);
          CHECK_THROWS(
              rank.wait(work), ErrorKind::kInvalidArgument,
              "rank 1 (a thread): tensors on GPUs need NCCL, which cannot be loaded: /nowhere");
        }
        std::vector<float> here = rank.input(5);
        rank.wait(rank.allreduce(here, "here"));
        CHECK(here == Rank::sums(5, rank.size()));
      },
      patient(), [](int rank) { return rank == 1 ? nccl::load("/nowhere") : double_api(); });
}

TEST(different_nccl_versions_are_refused) {
  const auto load = [](int rank) {
    nccl::Api api = double_api();
    api.version = rank == 0 ? 22803 : 22703;
    return api;
  };
  run_with_device(
      2,
      [](Rank& rank) {
        std::vector<float> values(3, 1.0f);
        std::atomic<bool> finished{false};
        CHECK_THROWS(rank.wait(submit(rank, values, "", finished)), ErrorKind::kInvalidArgument,
                     "rank 0 (a thread) has 2.28.3, rank 1 (a thread) has 2.27.3");
      },
      patient(), load);
}

TEST(joined_rank_contributes_zeros_on_the_device) {
  run_with_device(3, [](Rank& rank) {
    std::atomic<bool> finished{false};
    std::vector<float> ones(500, 1.0f);
    if (rank.rank() > 0) rank.wait(submit(rank, ones, "", finished));
    std::int64_t last = -1;
    Request request;
    request.fingerprint.collective = Collective::kJoin;
    request.fingerprint.name = kJoinKey;
    request.output = &last;
    rank.wait(rank.engine().submit(std::move(request), Engine::Mode::kBlocking));
    rank.engine().close();
    CHECK(ones == std::vector<float>(500, rank.rank() > 0 ? 2.0f : 1.0f));
  });
}

TEST(hanging_stream_is_aborted_when_a_rank_fails) {
  const FaultsEnd end;
  faults().aborted = 0;
  EngineConfig config = patient();
  config.timeout = std::chrono::milliseconds(300);
  run_with_device(
      2,
      [](Rank& rank) {
        std::atomic<bool> finished{false};
        std::vector<float> warm(3);
        rank.wait(submit(rank, warm, "warm", finished));
        std::vector<float> gate(1);
        rank.wait(rank.allreduce(gate, "gate"));
        faults().hang = 1;
        std::vector<float> values(3);
        rank.wait(submit(rank, values, "hangs", finished));  // enqueued
        std::vector<float> late(3);
        const auto work = rank.allreduce(late, rank.rank() == 0 ? "a" : "b");
        while (!work->done()) std::this_thread::yield();  // times out
        while (faults().aborted < rank.size()) std::this_thread::yield();
      },
      config);
}

}  // namespace
}  // namespace torch_ring::test::nccl_engine_test
