// SPDX-License-Identifier: Apache-2.0
// The NCCL double is as strict as NCCL may be.
#include "doubles/nccl_double.h"

#include <cstdlib>
#include <latch>
#include <optional>
#include <thread>

#include "doubles/nccl_streams.h"
#include "planes.h"
#include "test_world.h"

namespace torch_ring::test::nccl_double_test {
namespace {

using nccl::Result;

constexpr auto kInvalidArgument = static_cast<Result>(4);
constexpr auto kInvalidUsage = static_cast<Result>(5);
constexpr std::size_t kMailbox = 256 << 10;  // bytes on their way from one rank to another

/// A rank's communicator on a GPU of its own, without NcclCommunicator.
struct Bare {
  Bare(const nccl::UniqueId& id, int rank, int size, int gpu) : stream(gpu) {
    current_gpu = gpu;
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

nccl::UniqueId new_id() {
  nccl::UniqueId id{};
  CHECK(double_api().get_unique_id(&id) == Result::kSuccess);
  return id;
}

/// Runs `fn` on threads with a communicator each.
void run_bare(int size, const std::function<void(Bare&, int rank)>& fn) {
  const nccl::UniqueId id = new_id();
  run_ranks(size, [&](int rank) {
    Bare self(id, rank, size, rank);
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

TEST(nccl_double_ends_a_communicator_when_all_ranks_of_the_host_do) {
  for (const bool aborts : {false, true}) {
    std::latch looked(1);
    std::atomic<bool> ended{false};
    run_bare(2, [&](Bare& rank, int number) {
      const auto end = [&] {
        aborts ? rank.api.comm_abort(rank.comm) : rank.api.comm_destroy(rank.comm);
      };
      if (number == 0) {
        end();
        ended = true;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK(!ended);
        end();
      }
    });
    CHECK(ended);
  }
}

TEST(nccl_double_refuses_calls_on_another_device) {
  run_bare(1, [](Bare& rank, int) {
    std::vector<float> data(3, 1.0f);
    on_gpu(1, [&] {
      CHECK(rank.sum(data) == kInvalidUsage);
      CHECK(rank.api.comm_destroy(rank.comm) == kInvalidUsage);
    });
    const Stream other(1);
    CHECK(rank.api.all_reduce(data.data(), data.data(), 3, nccl::DataType::kFloat32,
                              nccl::RedOp::kSum, rank.comm, other.handle) == kInvalidUsage);
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

TEST(nccl_double_refuses_two_ranks_on_one_gpu) {
  const nccl::UniqueId id = new_id();
  run_ranks(2, [&](int rank) {
    Bare self(id, rank, 2, 0);
    CHECK(self.settled() == kInvalidUsage);
    const std::string text = self.api.get_last_error(self.comm);
    CHECK(text.starts_with("Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                           std::to_string(1 - rank) + " both on CUDA device"));
    CHECK(self.api.comm_abort(self.comm) == Result::kSuccess);
  });
}

TEST(nccl_double_adds_in_another_order_for_each_size) {
  run_bare(3, [](Bare& rank, int number) {
    // (1e8 + 1) - 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1.
    const float mine[] = {1e8f, 1.0f, -1e8f};
    std::vector<float> sums;
    for (const std::size_t count : {3, 4, 5}) {
      std::vector<float> data(count, mine[number]);
      rank.sum(data);
      CHECK(rank.settled() == Result::kSuccess);
      rank.stream.synchronize();
      CHECK_EQ(data, std::vector<float>(count, data[0]));
      sums.push_back(data[0]);
    }
    CHECK_EQ(sums, (std::vector<float>{0, 0, 1}));
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

TEST(nccl_double_ends_a_broadcast_at_its_root_before_the_others_begin) {
  std::latch done(1);
  run_bare(2, [&](Bare& rank, int number) {
    std::vector<std::byte> data(kMailbox / 2);
    for (int i = 0; i < 2; ++i) {  // the first one connects the ranks
      if (i == 1 && number == 1) done.wait();
      rank.api.broadcast(data.data(), data.data(), data.size(), nccl::DataType::kUInt8, 0,
                         rank.comm, rank.stream.handle);
      CHECK(rank.settled() == Result::kSuccess);
      rank.stream.synchronize();
      if (i == 1 && number == 0) done.count_down();
    }
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

TEST(nccl_double_waits_for_the_receiver_of_more_than_it_can_hold) {
  std::latch looked(1);
  run_bare(2, [&](Bare& rank, int number) {
    std::vector<std::byte> data(kMailbox + 1);
    for (const std::size_t bytes : {std::size_t{1}, kMailbox, data.size()}) {
      const bool is_large = bytes == data.size();
      if (is_large && number == 1) looked.wait();
      number == 0 ? rank.api.send(data.data(), bytes, nccl::DataType::kUInt8, 1, rank.comm,
                                  rank.stream.handle)
                  : rank.api.recv(data.data(), bytes, nccl::DataType::kUInt8, 0, rank.comm,
                                  rank.stream.handle);
      CHECK(rank.settled() == Result::kSuccess);
      if (is_large && number == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK(!rank.stream.done());
        looked.count_down();
      }
      rank.stream.synchronize();
    }
    CHECK(rank.api.comm_destroy(rank.comm) == Result::kSuccess);
  });
}

TEST(double_s_streams_block_the_host_when_they_are_full) {
  const Stream stream(0);
  std::latch gate(1);
  std::atomic<int> enqueued{0};
  std::thread host([&] {
    stream.enqueue([&] { gate.wait(); });
    for (int i = 0; i < 1500; ++i) {
      stream.enqueue([] {});
      ++enqueued;
    }
  });
  wait_until([&] { return enqueued >= 1023; }, "the queue is full");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(enqueued, 1023);
  gate.count_down();
  host.join();
  stream.synchronize();
}

}  // namespace
}  // namespace torch_ring::test::nccl_double_test
