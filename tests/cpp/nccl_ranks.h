// run_with_device(): ranks with engines that use NCCL's double, and host memory whose copies run on
// the double's streams.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/nccl_streams.h"
#include "engine_ranks.h"
#include "nccl/nccl_communicator.h"
#include "nccl/rendezvous.h"

namespace torch_ring::test {

inline constexpr std::uint8_t kDevice = 1;

/// A device over host memory, whose stream is the double's.
class StreamDevice final : public Device, public Buffers {
 public:
  StreamDevice(Communicator& host, const Abort& abort, const nccl::Rendezvous& rendezvous,
               std::chrono::milliseconds timeout)
      : api_(rendezvous.api),
        communicator_(api_, rendezvous.id, host.rank(), host.size(), abort, timeout,
                      {stream_.handle, {}}) {}

  Communicator& communicator() override { return communicator_; }
  Buffers& buffers() override { return *this; }
  void use(const std::function<void()>& enqueue) override {
    enqueue();
    ++enqueued_;
    stream_.enqueue([this] { ++done_; });
  }
  bool busy() override {
    communicator_.check();
    return done_ < enqueued_;
  }
  void abort() noexcept override { communicator_.abort(); }

  // Memory lives as long as the stream, which may use it.
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    return memory_.emplace_back(std::make_shared<std::byte[]>(bytes));
  }
  void* fusion_buffer(std::size_t bytes) override { return allocate(bytes).get(); }
  void copy(std::span<const Copy> copies, DType dtype) override {
    for (const Copy& copy : copies) {
      stream_.enqueue([copy, dtype] {
        if (copy.count > 0) std::memcpy(copy.to, copy.from, copy.count * size_of(dtype));
      });
    }
  }
  void fill_identity(void* data, std::size_t count, DType dtype, ReduceOp op) override {
    stream_.enqueue([=] { torch_ring::fill_identity(data, count, dtype, op); });
  }

 private:
  const nccl::Api api_;
  std::vector<std::shared_ptr<void>> memory_;
  int enqueued_ = 0;
  std::atomic<int> done_{0};
  Stream stream_;
  nccl::NcclCommunicator communicator_;
};

/// Runs `fn` on the ranks of one host, whose devices use the NCCL that `load` returns.
inline void run_with_device(
    int size, const std::function<void(Rank&)>& fn, const EngineConfig& config = patient(),
    const std::function<nccl::Api(int rank)>& load = [](int) { return double_api(); }) {
  std::vector<World> worlds = make_worlds(one_host(size));
  std::vector<std::unique_ptr<ControlPlane>> planes = make_planes(one_host(size));
  run_ranks(size, [&](int rank) {
    World& world = at(worlds, rank);
    const auto make = [&, labels = world.labels](std::uint8_t, Communicator& host,
                                                 const Abort& abort) -> std::unique_ptr<Device> {
      const auto rendezvous = nccl::rendezvous(host, labels, [&] { return load(host.rank()); });
      return std::make_unique<StreamDevice>(host, abort, rendezvous, config.timeout);
    };
    Rank self(world, std::move(at(planes, rank)), config, make);
    fn(self);
  });
}

/// Submits an allreduce of `values` on the device.
inline std::shared_ptr<Work> submit(Rank& rank, std::vector<float>& values, const std::string& name,
                                    std::atomic<bool>& finished) {
  Request request;
  request.fingerprint.device = kDevice;
  request.fingerprint.name = name;
  request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
  request.input = request.output = values.data();
  request.finish = [&] { finished = true; };
  return rank.engine().submit(std::move(request), Engine::Mode::kAsynchronous);
}

}  // namespace torch_ring::test
