#include "bindings/gradient_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ring {
namespace {

using torch::autograd::Node;

class GradientAllocator final : public c10::Allocator {
 public:
  /// torch's CPU allocator from the first call on. Never destroyed: tensors may outlive it.
  static GradientAllocator& installed() {
    static GradientAllocator* const allocator = [] {
      auto* const made = new GradientAllocator(*c10::GetCPUAllocator());
      // Without effect if another allocator has priority: gradients are copied then.
      c10::SetCPUAllocator(made);
      ::pthread_atfork([] { installed().mutex_.lock(); }, [] { installed().mutex_.unlock(); },
                       [] { installed().forget_parent(); });
      return made;
    }();
    return *allocator;
  }

  void add(const DirectGradient& gradient) {
    const std::scoped_lock lock(mutex_);
    gradients_[gradient.accumulator()].push_back(&gradient);
    least_bytes_ = std::min(least_bytes_.load(), gradient.bytes());
  }

  void remove(const DirectGradient& gradient) noexcept {
    const std::scoped_lock lock(mutex_);
    const auto found = gradients_.find(gradient.accumulator());
    if (found == gradients_.end()) return;
    std::erase(found->second, &gradient);
    if (found->second.empty()) gradients_.erase(found);
  }

  bool got(const DirectGradient& gradient, const void* data) {
    const std::scoped_lock lock(mutex_);
    const auto found = gradients_.find(gradient.accumulator());
    if (found == gradients_.end() || found->second.back() != &gradient) return false;
    const auto taken = taken_.find(data);
    return taken != taken_.end() && taken->second.pool == &gradient.blocks();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= least_bytes_.load(std::memory_order_relaxed)) {
      if (void* const data = take(bytes)) {
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return {data, data, &free, c10::kCPU};
      }
    }
    return others_.allocate(bytes);
  }

  /// A deleter of both kinds of memory: raw_allocate() (oneDNN's, in torch) returns an address
  /// only.
  c10::DeleterFnPtr raw_deleter() const override {
    return others_.raw_deleter() != nullptr ? &free : nullptr;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Taken {
    const BlockPool* pool;
    std::shared_ptr<void> block;
  };

  explicit GradientAllocator(c10::Allocator& others) : others_(others) {}

  void* take(std::size_t bytes) {
    const auto node = torch::autograd::get_current_node();
    if (!node) return nullptr;  // this thread is in no backward pass
    const std::scoped_lock lock(mutex_);
    BlockPool* const blocks = blocks_after(*node, bytes);
    std::shared_ptr<void> block = blocks != nullptr ? blocks->take(bytes) : nullptr;
    if (!block) return nullptr;
    void* const data = block.get();
    taken_.emplace(data, Taken{blocks, std::move(block)});
    return data;
  }

  /// The blocks for a gradient of this size that `node` computes; null if it computes none.
  BlockPool* blocks_after(const Node& node, std::size_t bytes) const {
    if (BlockPool* const blocks = blocks_of(&node, bytes)) return blocks;  // it accumulates
    for (const auto& edge : node.next_edges()) {
      const Node* const next = edge.function.get();
      if (next == nullptr) continue;
      if (BlockPool* const blocks = blocks_of(next, bytes)) return blocks;
      if (next->num_outputs() != 1) continue;
      if (BlockPool* const blocks = blocks_of(next->next_edge(0).function.get(), bytes)) {
        return blocks;
      }
    }
    return nullptr;
  }

  BlockPool* blocks_of(const Node* accumulator, std::size_t bytes) const {
    const auto found = gradients_.find(accumulator);
    if (found == gradients_.end() || found->second.back()->bytes() != bytes) return nullptr;
    return &found->second.back()->blocks();
  }

  static void free(void* data) {
    if (!installed().give_back(data)) return installed().others_.raw_deallocate(data);
    c10::profiledCPUMemoryReporter().Delete(data);
  }

  bool give_back(void* data) {
    const std::scoped_lock lock(mutex_);
    return taken_.erase(data) == 1;
  }

  void forget_parent() {
    least_bytes_ = kNothing;
    gradients_.clear();
    mutex_.unlock();
  }

  static constexpr std::size_t kNothing = std::numeric_limits<std::size_t>::max();

  c10::Allocator& others_;
  std::atomic<std::size_t> least_bytes_ = kNothing;  // of all gradients ever expected
  std::mutex mutex_;                                 // guards the members below
  // By accumulator, in the order of add(); the last one counts.
  std::unordered_map<const Node*, std::vector<const DirectGradient*>> gradients_;
  std::unordered_map<const void*, Taken> taken_;
};

}  // namespace

DirectGradient::DirectGradient(std::shared_ptr<BlockPool> blocks, const Node* accumulator,
                               std::size_t bytes)
    : blocks_(std::move(blocks)), accumulator_(accumulator), bytes_(bytes) {
  blocks_->expect(bytes_);
  GradientAllocator::installed().add(*this);
}

bool DirectGradient::got(const void* data) const {
  return GradientAllocator::installed().got(*this, data);
}

DirectGradient::~DirectGradient() {
  GradientAllocator::installed().remove(*this);
  blocks_->expect_no_more(bytes_);
}

}  // namespace torch_ring
