// SPDX-License-Identifier: Apache-2.0
#include "gradients/gradient_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ring {
namespace {

using torch::autograd::Node;

/// A 64-bit Bloom filter of the expected sizes: false positives are possible, false negatives are
/// not.
///
/// Thread: any. Relaxed: an expected size is added before its backward pass begins.
class SizeFilter {
 public:
  void add(std::size_t bytes) { bits_.fetch_or(bit(bytes), std::memory_order_relaxed); }
  void clear() { bits_.store(0, std::memory_order_relaxed); }
  bool may_have(std::size_t bytes) const {
    return (bits_.load(std::memory_order_relaxed) & bit(bytes)) != 0;
  }

 private:
  static std::uint64_t bit(std::size_t bytes) {
    return std::uint64_t{1} << (bytes * 0x9e3779b97f4a7c15u >> 58);  // Fibonacci hashing
  }

  std::atomic<std::uint64_t> bits_{0};
};

/// Replaces torch's CPU allocator while gradients are expected, and until all its blocks are free:
/// torch frees some memory by its address alone, through the present allocator.
class GradientAllocator final : public c10::Allocator {
 public:
  /// Never destroyed: tensors may outlive it, and refer to it.
  static GradientAllocator& instance() {
    static GradientAllocator* const allocator = [] {
      auto* const made = new GradientAllocator;
      ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                       [] { instance().forget_parent(); });
      return made;
    }();
    return *allocator;
  }

  void add(const DirectGradient& gradient) {
    const std::scoped_lock lock(mutex_);
    gradients_[gradient.accumulator()].push_back(&gradient);
    sizes_.add(gradient.bytes());
    install();
  }

  void remove(const DirectGradient& gradient) noexcept {
    const std::scoped_lock lock(mutex_);
    const auto found = gradients_.find(gradient.accumulator());
    if (found == gradients_.end()) return;
    std::erase(found->second, &gradient);
    if (found->second.empty()) gradients_.erase(found);
    uninstall_if_unused();
  }

  bool got(const DirectGradient& gradient, const void* data) {
    const std::scoped_lock lock(mutex_);
    const auto found = gradients_.find(gradient.accumulator());
    if (found == gradients_.end() || found->second.back() != &gradient) return false;
    const auto taken = taken_.find(data);
    return taken != taken_.end() && taken->second.pool == &gradient.blocks();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (sizes_.may_have(bytes)) {
      if (void* const data = take(bytes)) {
        c10::profiledCPUMemoryReporter().New(data, bytes);
        return {data, data, &free, c10::kCPU};
      }
    }
    return others().allocate(bytes);
  }

  /// A deleter of both kinds of memory: raw_allocate() (used by oneDNN in torch) returns only an
  /// address.
  c10::DeleterFnPtr raw_deleter() const override {
    return others().raw_deleter() != nullptr ? &free : nullptr;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Taken {
    const BlockPool* pool;
    std::shared_ptr<void> block;
  };

  GradientAllocator() = default;

  c10::Allocator& others() const { return *others_.load(std::memory_order_relaxed); }

  /// Makes this torch's allocator. Under mutex_.
  ///
  /// torch keeps its allocator in a plain pointer, which other threads may load at this moment.
  /// They get the old value or the new one, and both allocators work at any time. The fence orders
  /// this object's members before the pointer, for threads that reach them through it.
  void install() {
    if (is_installed_) return;
    c10::Allocator* const before = c10::GetCPUAllocator();
    // Another library may have put this one back: it must not pass requests on to itself.
    if (before != this) others_.store(before, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Has no effect if another allocator has priority: then gradients are copied.
    c10::SetCPUAllocator(this);
    is_installed_ = c10::GetCPUAllocator() == this;
  }

  /// Puts torch's allocator back. Under mutex_. If another library has replaced this allocator, its
  /// own may pass requests on to this one, which then stays and passes them on, too.
  void uninstall_if_unused() noexcept {
    if (!gradients_.empty()) return;
    sizes_.clear();
    if (!is_installed_ || !taken_.empty() || c10::GetCPUAllocator() != this) return;
    c10::SetCPUAllocator(&others());
    is_installed_ = false;
  }

  void* take(std::size_t bytes) {
    const auto node = torch::autograd::get_current_node();
    if (!node) return nullptr;  // no backward pass runs in this thread
    const std::scoped_lock lock(mutex_);
    BlockPool* const blocks = blocks_after(*node, bytes);
    std::shared_ptr<void> block = blocks != nullptr ? blocks->take(bytes) : nullptr;
    if (!block) return nullptr;
    void* const data = block.get();
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    first_ = std::min(first_.load(), address);
    last_ = std::max(last_.load(), address);
    taken_.emplace(data, Taken{blocks, std::move(block)});
    return data;
  }

  /// The blocks for a gradient of this size computed by `node`; null if it computes none.
  BlockPool* blocks_after(const Node& node, std::size_t bytes) const {
    if (BlockPool* const blocks = blocks_of(&node, bytes)) return blocks;  // the accumulator
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
    GradientAllocator& allocator = instance();
    if (!allocator.give_back(data)) return allocator.others().raw_deallocate(data);
    c10::profiledCPUMemoryReporter().Delete(data);
  }

  /// Returns whether a block begins at `data`.
  bool give_back(void* data) {
    // Relaxed: the freeing thread got the block's address from the thread that took it.
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    if (address < first_.load(std::memory_order_relaxed)) return false;
    if (address > last_.load(std::memory_order_relaxed)) return false;
    std::shared_ptr<void> block;  // freed without the lock
    const std::scoped_lock lock(mutex_);
    const auto found = taken_.find(data);
    if (found == taken_.end()) return false;
    block = std::move(found->second.block);
    taken_.erase(found);
    uninstall_if_unused();
    return true;
  }

  void forget_parent() noexcept {
    gradients_.clear();
    uninstall_if_unused();
    mutex_.unlock();
  }

  // Set before this is torch's allocator for the first time.
  std::atomic<c10::Allocator*> others_{nullptr};
  SizeFilter sizes_;  // of all gradients expected since the last time without any
  // The addresses of all blocks ever given lie between these.
  std::atomic<std::uintptr_t> first_{std::numeric_limits<std::uintptr_t>::max()};
  std::atomic<std::uintptr_t> last_{0};

  std::mutex mutex_;  // guards the members below
  bool is_installed_ = false;
  // By accumulator, in the order of add(); the last one counts.
  std::unordered_map<const Node*, std::vector<const DirectGradient*>> gradients_;
  std::unordered_map<const void*, Taken> taken_;
};

}  // namespace

DirectGradient::DirectGradient(std::shared_ptr<BlockPool> blocks, const Node* accumulator,
                               std::size_t bytes)
    : blocks_(std::move(blocks)), accumulator_(accumulator), bytes_(bytes) {
  blocks_->expect(bytes_);
  GradientAllocator::instance().add(*this);
}

bool DirectGradient::got(const void* data) const {
  return GradientAllocator::instance().got(*this, data);
}

DirectGradient::~DirectGradient() {
  GradientAllocator::instance().remove(*this);
  blocks_->expect_no_more(bytes_);
}

}  // namespace torch_ring
