// SPDX-License-Identifier: Apache-2.0
// Rank and run_engines(): engines of several ranks, as threads, over every communicator.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "planes.h"
#include "test_world.h"

namespace torch_ring::test {

/// One rank's engine over a communicator of its own, and the tensors of its requests.
class Rank {
 public:
  /// `plane`: of this rank; it leaves together with the rank.
  Rank(World& world, std::unique_ptr<ControlPlane> plane, const EngineConfig& config,
       DeviceExecutor::Make make_device = {}, std::function<void(Request&)> follow = {})
      : plane_(std::move(plane)),
        abort_(std::make_shared<Abort>()),
        waits_(plane_ ? plane_->waits(0, one_rank_a_host(world.topology.size()), config.patience())
                      : nullptr),
        communicator_(make_communicator((world.waits = waits_, world), config, *abort_)),
        engine_(communicator_, abort_,
                {config,
                 world.labels,
                 plane_.get(),
                 0,
                 one_rank_a_host(world.topology.size()),
                 waits_,
                 {},
                 [this](const std::string& text) {
                   {
                     const std::scoped_lock lock(mutex_);
                     log_ += text + "\n";
                   }
                   if (on_log_) on_log_();
                 },
                 std::move(make_device),
                 nullptr,
                 Transport::kLocal,
                 std::move(follow)}) {}

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  Engine& engine() { return engine_; }
  HostCommunicator& communicator() { return *communicator_; }
  /// Adds `handler` to the log handler. Call before any submit.
  void on_log(std::function<void()> handler) { on_log_ = std::move(handler); }
  std::string log() {
    const std::scoped_lock lock(mutex_);
    return log_;
  }

  /// The sums over the ranks, where element i on a rank is i * size + rank.
  static std::vector<float> sums(std::size_t count, int size) {
    std::vector<float> sums(count);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<float>(i) * static_cast<float>(size * size) +
                static_cast<float>(size * (size - 1) / 2);
    }
    return sums;
  }

  std::vector<float> input(std::size_t count) const {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(i) * static_cast<float>(size()) + static_cast<float>(rank());
    }
    return values;
  }

  std::shared_ptr<Work> allreduce(std::vector<float>& values, const std::string& name,
                                  Engine::Mode mode = Engine::Mode::kAsynchronous) {
    return engine_.submit(allreduce_of(values, name), mode);
  }

  void allreduce_now(std::vector<float>& values, const std::string& name = "") {
    engine_.submit_and_wait(allreduce_of(values, name), {});
  }

  void wait(const std::shared_ptr<Work>& work) { engine_.wait(*work, {}); }

  static Request allreduce_of(std::vector<float>& values, const std::string& name) {
    Request request;
    request.fingerprint.name = name;
    request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
    request.input = request.output = values.data();
    return request;
  }

 private:
  std::mutex mutex_;
  std::string log_;
  std::function<void()> on_log_;
  std::unique_ptr<ControlPlane> plane_;
  std::shared_ptr<Abort> abort_;
  std::shared_ptr<WaitGraph> waits_;
  std::shared_ptr<HostCommunicator> communicator_;
  Engine engine_;
};

inline void run_engines(const std::vector<int>& host_of, const std::function<void(Rank&)>& fn,
                        const EngineConfig& config = patient(),
                        std::chrono::milliseconds heartbeat_timeout = std::chrono::minutes(1)) {
  std::vector<World> worlds = make_worlds(host_of);
  Planes planes = make_planes(host_of, heartbeat_timeout);
  run_ranks(static_cast<int>(host_of.size()), [&](int rank) {
    Rank self(at(worlds, rank), std::move(at(planes, rank)), config);
    fn(self);
  });
}

struct Hosts {
  const char* name;
  std::vector<int> host_of;
};
inline const std::vector<Hosts> kLayouts{
    {"one rank", {0}},
    {"shm x2", {0, 0}},
    {"shm x3", {0, 0, 0}},
    {"tcp x2", {0, 1}},
    {"tcp x3", {0, 1, 2}},
    {"2 hosts x2", {0, 0, 1, 1}},
    {"hosts of 2 and 1", {0, 0, 1}},
    {"interleaved", {0, 1, 0, 1}},
    {"tcp x4", {0, 1, 2, 3}},
};
inline constexpr std::size_t kMostRanks = kSanitized ? 3 : 4;  // as in add_for_sizes()

inline bool on_all_layouts(const std::string& name, const std::function<void(Rank&)>& fn,
                           std::size_t smallest = 1, const std::string& failpoints = "") {
  for (const Hosts& layout : kLayouts) {
    if (layout.host_of.size() < smallest || layout.host_of.size() > kMostRanks) continue;
    add_test(std::string("engine, ") + layout.name + ": " + name, [=] {
      const Armed armed(failpoints);
      run_engines(layout.host_of, fn);
    });
  }
  return true;
}

}  // namespace torch_ring::test
