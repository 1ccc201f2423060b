// SPDX-License-Identifier: Apache-2.0
// The NCCL double is as strict as NCCL may be, where tests of the product rely on it.
#include "doubles/nccl_double.h"

#include <latch>
#include <thread>

#include "doubles/nccl_streams.h"
#include "planes.h"
#include "test_world.h"

namespace torch_ring::test::nccl_double_test {
namespace {

using nccl::Result;

constexpr auto kInvalidArgument = static_cast<Result>(4);

/// A rank's communicator on a GPU of its own, without NcclCommunicator.
struct Bare {
  Bare(const nccl::UniqueId& id, int rank, int size) : stream(rank) {
    current_gpu = rank;
    nccl::Config config;
    CHECK(api.comm_init_rank_config(&comm, size, id, rank, &config) == Result::kInProgress);
  }

  Result poll() {
    Result state = Result::kSuccess;
    CHECK(api.comm_get_async_error(comm, &state) == Result::kSuccess);
    return state;
  }
  Result settled() {
    Result state = Result::kInProgress;
    wait_until([&] { return (state = poll()) != Result::kInProgress; }, "the launch is over");
    return state;
  }
  Result sum(std::vector<float>& data) {
    return api.all_reduce(data.data(), data.data(), data.size(), nccl::DataType::kFloat32,
                          nccl::RedOp::kSum, comm, stream.handle);
  }

  const nccl::Api& api = double_api();
  Stream stream;
  nccl::Comm comm = nullptr;
};

/// Runs `fn` on threads with a communicator each.
void run_bare(int size, const std::function<void(Bare&, int rank)>& fn) {
  nccl::UniqueId id{};
  CHECK(double_api().get_unique_id(&id) == Result::kSuccess);
  run_ranks(size, [&](int rank) {
    Bare self(id, rank, size);
    CHECK(self.settled() == Result::kSuccess);
    fn(self, rank);
  });
}

TEST(nccl_double_refuses_calls_before_the_last_one_has_succeeded) {
  run_bare(1, [](Bare& rank, int) {
    std::vector<float> data(3, 1.0f);
    const auto threads = counts().threads.load();
    CHECK(rank.sum(data) == Result::kInProgress);
    CHECK_EQ(counts().threads - threads, 1);
    CHECK(rank.sum(data) == kInvalidArgument);
    CHECK(rank.api.group_start() == Result::kSuccess);
    CHECK(rank.sum(data) == kInvalidArgument);
    CHECK(rank.api.group_end() == kInvalidArgument);
    CHECK(rank.api.comm_destroy(rank.comm) == kInvalidArgument);
    CHECK(rank.settled() == Result::kSuccess);
    CHECK(rank.sum(data) == Result::kInProgress);
    CHECK(rank.settled() == Result::kSuccess);
    rank.stream.synchronize();
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

TEST(nccl_double_connects_all_ranks_in_the_first_collective_of_each_kind) {
  std::latch late(1);
  run_bare(2, [&](Bare& rank, int number) {
    std::vector<float> data(3, 1.0f);
    if (number == 1) late.wait();
    CHECK(rank.sum(data) == Result::kInProgress);
    if (number == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      CHECK(rank.poll() == Result::kInProgress);
      late.count_down();
    }
    CHECK(rank.settled() == Result::kSuccess);
    rank.stream.synchronize();
    CHECK_EQ(data, std::vector<float>(3, 2.0f));
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

TEST(nccl_double_launches_later_collectives_without_the_other_rank) {
  std::latch launched(1);
  run_bare(2, [&](Bare& rank, int number) {
    std::vector<float> data(3, 1.0f);
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && number == 1) launched.wait();
      rank.sum(data);
      CHECK(rank.settled() == Result::kSuccess);
      if (i == 1 && number == 0) launched.count_down();
    }
    rank.stream.synchronize();
    CHECK_EQ(data, std::vector<float>(3, 4.0f));
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

/// NCCL chooses algorithm and channels for a group as a whole.
TEST(nccl_double_hangs_when_ranks_group_differently) {
  const std::int64_t before = counts().misgrouped;
  run_bare(2, [&](Bare& self, int rank) {
    std::vector<float> a(7, 1.0f);
    std::vector<float> b(7, 1.0f);
    if (rank == 0) CHECK(self.api.group_start() == Result::kSuccess);
    self.sum(a);
    if (rank == 1) CHECK(self.settled() == Result::kSuccess);
    self.sum(b);
    if (rank == 0) CHECK(self.api.group_end() == Result::kInProgress);
    CHECK(self.settled() == Result::kSuccess);
    wait_until([&] { return counts().misgrouped == before + 2; }, "both ranks hang");
    self.api.comm_abort(std::exchange(self.comm, nullptr));
    self.stream.synchronize();
    CHECK(a == std::vector<float>(7, 1.0f));
  });
}

}  // namespace
}  // namespace torch_ring::test::nccl_double_test
