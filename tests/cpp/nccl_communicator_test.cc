// SPDX-License-Identifier: Apache-2.0
// NcclCommunicator on a stand-in for NCCL (doubles/nccl_double.h).

#include "nccl/nccl_communicator.h"

#include <cmath>
#include <cstring>
#include <deque>

#include "communicator_suite.h"
#include "doubles/nccl_streams.h"
#include "planes.h"

namespace torch_ring::test::nccl_communicator_test {
using nccl::NcclCommunicator;

namespace {

/// One rank's NcclCommunicator, its stream, and its CPU communicator for agreement. Each call waits
/// for the stream, so that the suites run on it unchanged.
class OnStream final : public HostCommunicator {
 public:
  OnStream(std::shared_ptr<HostCommunicator> host, const Abort& abort,
           std::chrono::milliseconds timeout = patient().timeout)
      : host_(std::move(host)), stream_(host_->rank()) {
    current_gpu = rank();
    nccl::UniqueId id{};
    if (rank() == 0) CHECK(double_api().get_unique_id(&id) == nccl::Result::kSuccess);
    host_->broadcast(&id, sizeof id, 0);
    const auto scale = [this](void* output, const void* input, std::size_t count, DType dtype,
                              const Scaling& scaling) {
      stream_.enqueue([=] {
        const void* const inputs[] = {input};
        void* const outputs[] = {output};
        reduce(outputs, inputs, count, {dtype, ReduceOp::kSum, scaling});
      });
    };
    const auto allocate = [this](std::size_t bytes) {
      return static_cast<void*>(memory_.emplace_back(bytes).data());
    };
    const auto widen = [this](const void* data, std::size_t count, const Reduction& reduction) {
      auto& wide = wide_.emplace_back(count);
      stream_.enqueue([=, to = wide.data()] {
        Elements elements(reduction.dtype, count);
        if (count > 0) std::memcpy(elements.data(), data, elements.bytes().size());
        for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(elements.at(i));
      });
      return nccl::Widened{wide.data(), 1, DType::kInt64};
    };
    const auto narrow = [this](void* output, const nccl::Widened& wide, std::size_t count,
                               const Reduction& reduction) {
      stream_.enqueue([=] {
        Elements elements(reduction.dtype, count);
        for (std::size_t i = 0; i < count; ++i) {
          const auto sum = static_cast<const std::int64_t*>(wide.data)[i];
          elements.set(i, static_cast<double>(sum / reduction.scaling.divisor));
        }
        if (count > 0) std::memcpy(output, elements.data(), elements.bytes().size());
      });
    };
    nccl::Device device = device_of(stream_);
    device.scale = scale;
    device.allocate = allocate;
    device.widen = widen;
    device.narrow = narrow;
    device.log = [this](const std::string& line) { log_ += line + "\n"; };
    nccl_ = std::make_unique<NcclCommunicator>(double_api(), id, rank(), size(), abort, timeout,
                                               device);
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  Board& board() override { return host_->board(); }
  NcclCommunicator& nccl() { return *nccl_; }
  Stream& stream() { return stream_; }
  const std::string& log() const { return log_; }  // warnings

  void allreduce(const void* input, void* output, std::size_t count, const Reduction& reduction,
                 std::span<const std::int64_t>) override {
    nccl_->allreduce(input, output, count, reduction);
    stream_.synchronize();
  }
  void broadcast(void* data, std::size_t bytes, int root) override {
    nccl_->broadcast(data, bytes, root);
    stream_.synchronize();
  }
  void allgather(const void* input, void* output, std::span<const std::size_t> bytes) override {
    nccl_->allgather(input, output, bytes);
    stream_.synchronize();
  }
  void alltoall(const void* input, void* output, std::span<const std::size_t> bytes) override {
    nccl_->alltoall(input, output, bytes);
    stream_.synchronize();
  }
  void reducescatter(const void* input, void* output, std::span<const std::size_t> counts,
                     const Reduction& reduction) override {
    nccl_->reducescatter(input, output, counts, reduction);
    stream_.synchronize();
  }
  void reduce_to(int root, const void* input, void* output, std::size_t count,
                 const Reduction& reduction) override {
    nccl_->reduce_to(root, input, output, count, reduction);
    stream_.synchronize();
  }
  void gather(const void* input, void* output, std::span<const std::size_t> bytes,
              int root) override {
    nccl_->gather(input, output, bytes, root);
    stream_.synchronize();
  }
  void scatter(const void* input, void* output, std::span<const std::size_t> bytes,
               int root) override {
    nccl_->scatter(input, output, bytes, root);
    stream_.synchronize();
  }
  void barrier() override { host_->barrier(); }

 private:
  std::shared_ptr<HostCommunicator> host_;
  std::deque<std::vector<std::int64_t>> wide_;  // the stream's
  std::deque<std::vector<std::byte>> memory_;   // the stream's
  Stream stream_;
  std::string log_;
  std::unique_ptr<NcclCommunicator> nccl_;
};

Layout on_double(std::vector<int> sizes, std::chrono::milliseconds timeout = patient().timeout) {
  return {"nccl double",
          one_host,
          std::move(sizes),
          Sockets::kUnix,
          false,
          1,
          [timeout](std::shared_ptr<HostCommunicator> host, Abort& abort) {
            return std::make_unique<OnStream>(std::move(host), abort, timeout);
          }};
}

void run_on_double(int size, const std::function<void(OnStream&, Abort&)>& fn,
                   std::chrono::milliseconds timeout = patient().timeout) {
  run_world(on_double({}, timeout), size, [&](Communicator& communicator, Abort& abort) {
    fn(dynamic_cast<OnStream&>(communicator), abort);
  });
}

[[maybe_unused]] const bool added = [] {
  const Layout layout = on_double({1, 2, 3});
  add_for_sizes(layout, "allreduce of every dtype and operator", allreduce_all);
  add_for_sizes(layout, "allreduce with factors", allreduce_scaled);
  add_for_sizes(layout, "broadcast from every root", broadcast_from_every_root);
  add_for_sizes(layout, "allgather of ragged and empty parts", allgather_ragged);
  add_for_sizes(layout, "reducescatter of every dtype and operator", reducescatter_all);
  add_for_sizes(layout, "alltoall", alltoall_all);
  add_for_sizes(layout, "reduce of every dtype and operator", reduce_of_every_kind);
  add_for_sizes(layout, "gather and scatter", gather_and_scatter);
  add_for_sizes(layout, "agreement and data in turns", everything_in_turns);
  return true;
}();

constexpr std::size_t kCount = 1000;

std::vector<float> ones() { return std::vector<float>(kCount, 1.0f); }

void sum(OnStream& rank, std::vector<float>& data, const Scaling& scaling = {}) {
  rank.nccl().allreduce(data.data(), data.data(), kCount,
                        {DType::kFloat32, ReduceOp::kSum, scaling});
}

}  // namespace

TEST(nccl_calls_return_before_the_stream_has_run_them) {
  run_on_double(2, [](OnStream& rank, Abort&) {
    std::latch gate(1);
    std::vector<float> data(kCount, 0.0f);
    rank.stream().enqueue([&] {
      gate.wait();
      std::fill(data.begin(), data.end(), 1.0f);
    });
    sum(rank, data, {.postscale = 3, .divisor = 2});
    CHECK_EQ(data[0], 0.0f);  // the stream waits at the gate
    gate.count_down();
    rank.stream().synchronize();
    CHECK(data == std::vector<float>(kCount, 3.0f));
  });
}

TEST(nccl_average_of_float16_does_not_overflow) {
  for (const int size : {2, 3, 4}) {
    run_on_double(size, [size](OnStream& rank, Abort&) {
      const auto all = kCount * static_cast<std::size_t>(size);
      const auto values = [](std::size_t count) {
        return Elements::repeating(DType::kFloat16, count, 1, [](auto) { return 40'000; });
      };
      const auto check = [](const Elements& result) {  // float16's spacing there is 32
        for (std::size_t i = 0; i < result.count(); ++i) {
          CHECK(std::fabs(result.at(i) - 40'000) <= 64);
        }
      };
      // The second overflows in the inputs already, unless all factors are one.
      for (const Scaling& scaling : {Scaling{.divisor = size}, Scaling{4, 0.25, size}}) {
        const Reduction reduction{DType::kFloat16, ReduceOp::kSum, scaling};
        Elements input = values(all);
        Elements output(DType::kFloat16, all);
        rank.allreduce(input.data(), output.data(), all, reduction, {});
        check(output);
        Elements part(DType::kFloat16, kCount);
        const std::vector<std::size_t> equal(static_cast<std::size_t>(size), kCount);
        rank.reducescatter(input.data(), part.data(), equal, reduction);
        check(part);
        std::vector<std::size_t> ragged(static_cast<std::size_t>(size), 0);
        ragged.back() = kCount;
        Elements last(DType::kFloat16, rank.rank() + 1 == size ? kCount : 0);
        rank.reducescatter(input.data(), last.data(), ragged, reduction);
        check(last);
        CHECK(same(input.bytes(), values(all).bytes()));
        rank.allreduce(input.data(), input.data(), all, reduction, {});
        check(input);
      }
    });
  }
}

/// For 2, 4, 8, ... ranks NCCL multiplies the inputs by 1/n, so their sum may be larger than the
/// dtype's largest number.
TEST(nccl_average_of_larger_floats_does_not_overflow) {
  for (const auto& [dtype, value] : {std::pair(DType::kFloat32, 3e38), {DType::kFloat64, 1e308}}) {
    run_on_double(4, [dtype = dtype, value = value](OnStream& rank, Abort&) {
      const std::vector<std::size_t> counts(4, kCount);
      for (const Scaling& scaling : {Scaling{.divisor = 4}, Scaling{2, 0.5, 4}}) {
        const Reduction reduction{dtype, ReduceOp::kSum, scaling};
        const double input = value / scaling.prescale;
        Elements all = Elements::repeating(dtype, 4 * kCount, 1, [&](auto) { return input; });
        Elements part(dtype, kCount);
        rank.reducescatter(all.data(), part.data(), counts, reduction);
        rank.allreduce(all.data(), all.data(), all.count(), reduction, {});
        for (const Elements* const result : {&all, &part}) {
          for (std::size_t i = 0; i < result->count(); ++i) {
            CHECK(std::fabs(result->at(i) / input - 1) < 1e-6);
          }
        }
      }
    });
  }
}

TEST(nccl_reducescatter_scales_inputs_and_result) {
  run_on_double(2, [](OnStream& rank, Abort&) {
    for (const DType dtype : {DType::kFloat32, DType::kInt16, DType::kInt32}) {
      Elements input = Elements::repeating(dtype, 2 * kCount, 1, [](auto) { return 5; });
      Elements output(dtype, kCount);
      const std::vector<std::size_t> counts{kCount, kCount};
      rank.reducescatter(input.data(), output.data(), counts,
                         {dtype, ReduceOp::kSum, {.prescale = 2}});
      for (std::size_t i = 0; i < kCount; ++i) CHECK_EQ(output.at(i), 20);
      CHECK_EQ(input.at(0), 5);
    }
  });
}

TEST(nccl_call_waits_while_its_result_is_in_progress) {
  const FaultsEnd end;
  faults().in_progress = 5;
  run_on_double(2, [](OnStream& rank, Abort&) {
    std::vector<float> data = ones();
    for (int i = 0; i < 3; ++i) sum(rank, data);
    rank.stream().synchronize();
    CHECK_EQ(data[0], 8.0f);
  });
}

TEST(nccl_asynchronous_error_is_thrown_and_aborts_the_communicator) {
  const FaultsEnd end;
  for (const auto& [code, kind, text] :
       {std::tuple{6, ErrorKind::kPeerLost, "NCCL: remote process exited (as told); another rank"},
        std::tuple{1, ErrorKind::kInternal, "NCCL: the double's error (as told)"}}) {
    const int aborted = faults().aborted;
    std::vector<float> data = ones();  // outlives the communicators, which may use it
    run_on_double(2, [&](OnStream& rank, Abort&) {
      std::vector<float> first = ones();
      sum(rank, first);  // connects the ranks
      rank.stream().synchronize();
      rank.barrier();
      if (rank.rank() == 0) {  // alone: its stream waits for rank 1 for ever
        sum(rank, data);
        faults().async_error = code;
        CHECK_THROWS(rank.nccl().check(), kind, text);
        faults().async_error = 0;
      }
      rank.barrier();
    });
    CHECK_EQ(faults().aborted, aborted + 1);
  }
}

TEST(nccl_constructor_times_out_when_ranks_are_missing) {
  const FaultsEnd end;
  faults().init_hangs = true;
  const int aborted = faults().aborted;
  run_world({"shm", one_host}, 2, [](Communicator& host, Abort& abort) {
    const Stream stream(host.rank());
    current_gpu = host.rank();
    const auto make = [&] {
      nccl::UniqueId id{};
      CHECK(double_api().get_unique_id(&id) == nccl::Result::kSuccess);
      NcclCommunicator(double_api(), id, host.rank(), 2, abort, std::chrono::milliseconds(50),
                       device_of(stream));
    };
    CHECK_THROWS(make(), ErrorKind::kTimeout, "ncclCommInitRankConfig was not taken within 0.05");
  });
  CHECK_EQ(faults().aborted, aborted + 2);
}

TEST(nccl_wait_throws_the_abort_cause) {
  const FaultsEnd end;
  std::vector<float> of_rank[] = {ones(), ones()};
  run_on_double(2, [&](OnStream& rank, Abort& abort) {
    rank.barrier();
    faults().in_progress = 1'000'000'000;
    abort.raise(Error(ErrorKind::kPeerLost, "rank 7 is lost"));
    CHECK_THROWS(sum(rank, of_rank[rank.rank()]), ErrorKind::kPeerLost, "rank 7 is lost");
  });
}

/// A communicator of one rank, which adds its warnings to `log`.
std::unique_ptr<NcclCommunicator> alone(const Stream& stream, const Abort& abort,
                                        std::string& log) {
  nccl::UniqueId id{};
  CHECK(double_api().get_unique_id(&id) == nccl::Result::kSuccess);
  nccl::Device device = device_of(stream);
  device.log = [&log](const std::string& line) { log += line + "\n"; };
  return std::make_unique<NcclCommunicator>(double_api(), id, 0, 1, abort,
                                            std::chrono::milliseconds(100), device);
}

TEST(nccl_that_hangs_in_an_abort_is_left_behind) {
  const FaultsEnd end;
  const Stream stream(0);
  const Abort abort;
  std::string log;
  std::vector<float> data = ones();
  const auto communicator = alone(stream, abort, log);
  faults().hang = 1;
  communicator->allreduce(data.data(), data.data(), kCount, {DType::kFloat32, ReduceOp::kSum, {}});
  faults().end_hangs = 1;
  const int freed = faults().freed;
  communicator->abort();
  CHECK_EQ(
      log,
      "rank 0: ncclCommAbort has not returned within 0.1 s; its thread and its memory are left "
      "behind\n");
  CHECK(!communicator->close());
  CHECK_EQ(faults().freed, freed);
  faults().end_hangs = 0;
  stream.synchronize();
  wait_until([&] { return faults().freed == freed + 1; }, "the thread goes on");
}

TEST(nccl_ends_aside_when_the_other_ranks_do) {
  const FaultsEnd end;
  const int aborted = faults().aborted;
  run_on_double(3, [](OnStream& rank, Abort&) {
    std::vector<float> data = ones();
    sum(rank, data);
    rank.stream().synchronize();
    rank.barrier();
    const int freed = faults().freed;
    rank.barrier();
    if (rank.rank() > 0) CHECK(rank.nccl().close());
    rank.barrier();  // rank 0 goes on meanwhile
    CHECK_EQ(faults().freed, freed);
    rank.barrier();
    if (rank.rank() == 0) CHECK(rank.nccl().close());
    wait_until([&] { return faults().freed == freed + 3; }, "all have ended");
    CHECK_EQ(rank.log(), "");
  });
  CHECK_EQ(faults().aborted, aborted);
}

TEST(nccl_launch_is_polled_without_sleeps) {
  run_on_double(1, [](OnStream& rank, Abort&) {
    std::vector<float> data = ones();
    // Not each of them, because on busy processors most waits sleep.
    const auto sleeps_not = [&] {
      const std::int64_t before[] = {counts().threads, counts().polls, counts().sleeps};
      sum(rank, data);
      rank.stream().synchronize();
      CHECK_EQ(counts().threads - before[0], 1);
      CHECK(counts().polls - before[1] >= 1);
      return counts().sleeps == before[2];
    };
    wait_until(sleeps_not, "a launch has not slept");
  });
}

TEST(nccl_launch_that_waits_for_a_late_rank_sleeps) {
  run_on_double(2, [](OnStream& rank, Abort&) {
    const auto before = counts().sleeps.load();
    std::vector<float> data = ones();
    if (rank.rank() == 1) {
      wait_until([&] { return counts().sleeps - before > 10; }, "rank 0 sleeps");
    }
    sum(rank, data);
    rank.stream().synchronize();
  });
}

TEST(nccl_load_refuses_missing_and_old_libraries) {
  const FaultsEnd end;
  faults().version = 21403;
  CHECK_THROWS(nccl::load(NCCL_DOUBLE), ErrorKind::kInvalidArgument,
               "is NCCL 2.14.3; 2.18.5 or newer is needed");
  CHECK_THROWS(nccl::load("/nowhere/libnccl.so"), ErrorKind::kInvalidArgument,
               "tensors on GPUs need NCCL, which cannot be loaded: /nowhere/libnccl.so");
  CHECK_THROWS(nccl::load("libm.so.6"), ErrorKind::kInvalidArgument, "has no ncclGetVersion");
}

}  // namespace torch_ring::test::nccl_communicator_test
