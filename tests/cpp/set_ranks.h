// SPDX-License-Identifier: Apache-2.0
// SetRank and run_sets(): ranks with engines of several process sets, and stand-ins for their GPUs,
// each of which runs one operation of NCCL at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "planes.h"
#include "stream_device.h"
#include "test_world.h"

namespace torch_ring::test {

using Sets = std::vector<std::vector<int>>;  // the ranks of each process set, ascending

/// One rank, its GPU, and an engine for each of its sets.
class SetRank {
 public:
  /// `worlds`: of the sets, by set and rank in it. `order`: null for no common order.
  SetRank(int rank, const Sets& sets, std::vector<std::vector<World>>& worlds, ControlPlane& plane,
          const std::shared_ptr<LaunchOrder>& order)
      : rank_(rank), parts_(sets.size()) {
    for (std::size_t set = 0; set < sets.size(); ++set) {
      const auto place = std::ranges::find(sets[set], rank);
      if (place == sets[set].end()) continue;
      const auto index = static_cast<std::size_t>(place - sets[set].begin());
      parts_[set].emplace(rank, set + 1, sets[set], worlds[set][index], plane, order);
    }
  }
  ~SetRank() { close(); }

  int rank() const { return rank_; }
  bool is_in(std::size_t set) const { return parts_[set].has_value(); }
  Engine& engine(std::size_t set) { return *parts_[set]->engine; }

  /// A tensor that lives until no device uses it any more, even if the test fails.
  std::vector<float>& tensor(std::size_t count = 5, float value = 1) {
    return tensors_.emplace_back(count, value);
  }

  /// Requests the sum of `values` over a set's ranks, in place and on the device. `begin`: called
  /// before it is enqueued.
  std::shared_ptr<Work> sum(std::size_t set, const std::string& name, std::vector<float>& values,
                            std::function<void()> begin = {}) {
    Part& part = *parts_[set];
    ++part.submitted;
    Request request;
    request.fingerprint.device = 1;
    request.fingerprint.name = name;
    request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
    request.input = request.output = values.data();
    request.begin = std::move(begin);
    request.finish = [&part] { part.device->stream().enqueue([&part] { ++part.ran; }); };
    return part.engine->submit(std::move(request), Engine::Mode::kAsynchronous);
  }

  /// The same in the memory of the host.
  std::shared_ptr<Work> sum_here(std::size_t set, const std::string& name,
                                 std::vector<float>& values) {
    Request request;
    request.fingerprint.name = name;
    request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
    request.input = request.output = values.data();
    return parts_[set]->engine->submit(std::move(request), Engine::Mode::kAsynchronous);
  }

  /// The number of a set's sums that the device has run, or given up.
  int ran(std::size_t set) const { return parts_[set]->ran; }

  /// Waits for all sums, whose works are done; ends the sets if the device makes no progress.
  void synchronize() {
    try {
      for (std::optional<Part>& part : parts_) {
        if (!part) continue;
        wait_until([&] { return part->ran == part->submitted; },
                   "rank " + std::to_string(rank_) + "'s device has run all sums");
      }
    } catch (const CheckFailed&) {
      for (std::optional<Part>& part : parts_) {
        if (part) end(*part->engine);
      }
      throw;
    }
  }

  /// Ends a set on all of its ranks.
  static void end(Engine& engine) {
    try {
      engine.end(Error(ErrorKind::kInternal, "given up"));
    } catch (const Error&) {  // this cause, or another rank's
    }
  }

  void close() {
    for (std::optional<Part>& part : parts_) {
      if (part) part->engine->close();
    }
  }

 private:
  struct Part {
    Part(int gpu, std::uint64_t number, const std::vector<int>& members, World& world,
         ControlPlane& plane, const std::shared_ptr<LaunchOrder>& order)
        : abort(std::make_shared<Abort>()) {
      for (std::size_t i = 0; i < members.size(); ++i) {
        world.labels[i] = "rank " + std::to_string(members[i]) + " (a thread)";
      }
      const EngineConfig config = patient();
      world.waits = plane.waits(number, members, config.patience());
      const auto communicator = make_communicator(world, config, *abort);
      const auto make = [this, gpu, config, labels = world.labels](
                            std::uint8_t, Communicator& host,
                            const Abort& cause) -> std::unique_ptr<Device> {
        current_gpu = gpu;
        const auto rendezvous = nccl::rendezvous(host, labels, [] { return double_api(); });
        auto made = std::make_unique<StreamDevice>(host, cause, rendezvous, config.timeout, gpu);
        device = made.get();
        return made;
      };
      engine = std::make_unique<Engine>(
          communicator, abort,
          Engine::Options{
              config, world.labels, &plane, number, members, world.waits, {}, {}, make, order});
    }

    std::shared_ptr<Abort> abort;
    StreamDevice* device = nullptr;
    int submitted = 0;
    std::atomic<int> ran{0};
    std::unique_ptr<Engine> engine;
  };

  const int rank_;
  std::deque<std::vector<float>> tensors_;
  std::vector<std::optional<Part>> parts_;  // by set; none for sets without this rank
};

/// Runs `fn` on `size` ranks of one host. `ordered`: whether their sets enqueue in one order.
inline void run_sets(int size, const Sets& sets, const std::function<void(SetRank&)>& fn,
                     bool ordered = true) {
  const FaultsEnd end;
  faults().serial = 1;
  std::vector<std::vector<World>> worlds;
  for (const std::vector<int>& members : sets) {
    worlds.push_back(make_worlds(one_host(static_cast<int>(members.size()))));
  }
  Planes planes = make_planes(one_host(size));
  run_ranks(size, [&](int rank) {
    std::shared_ptr<LaunchOrder> order;
    if (ordered) (order = std::make_shared<LaunchOrder>())->share();
    const std::unique_ptr<ControlPlane> plane = std::move(at(planes, rank));
    SetRank self(rank, sets, worlds, *plane, order);
    fn(self);
  });
}

}  // namespace torch_ring::test
