// SPDX-License-Identifier: Apache-2.0
// run_with_device(): ranks with engines that use NCCL's double, and host memory whose copies run on
// the double's streams.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/nccl_streams.h"
#include "engine_ranks.h"
#include "nccl/rendezvous.h"
#include "stream_device.h"

namespace torch_ring::test {

inline constexpr std::uint8_t kDevice = 1;

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
      return std::make_unique<StreamDevice>(host, abort, rendezvous, config.timeout, host.rank());
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
