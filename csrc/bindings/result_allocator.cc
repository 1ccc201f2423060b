#include "bindings/result_allocator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/strides.h>

#include "bindings/tensor_memory.h"
#include "memory/page_pool.h"

namespace torch_ring {

namespace {

// Bytes from which results lie in pooled pages. malloc() keeps the pages of smaller blocks.
constexpr std::size_t kLarge = 4u << 20;

class ResultAllocator final : public c10::Allocator {
 public:
  /// Never destroyed: tensors may outlive everything else.
  static ResultAllocator& instance() {
    static auto* const allocator = new ResultAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    // A tensor of this allocator may have been resized to a small one.
    void* const data = bytes >= kLarge ? pages_.take(bytes) : nullptr;
    if (data == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    c10::DataPtr owner{data, data, &give_back, c10::kCPU};
    c10::profiledCPUMemoryReporter().New(data, PagePool::bytes_of(data));
    return owner;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  PagePool& pages() { return pages_; }

 private:
  static void give_back(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    instance().pages_.give_back(data);
  }

  PagePool pages_{0};
};

/// Whether a result of `numel` elements lies in kept pages. All others than plain tensors on the
/// host are made by torch.
bool is_kept(const at::Tensor& like, std::int64_t numel) {
  return like.is_cpu() && like.layout() == at::kStrided && !like.is_nested() &&
         like.has_storage() && !like.unsafeGetTensorImpl()->is_python_dispatch() &&
         static_cast<std::size_t>(numel) * like.element_size() >= kLarge;
}

at::Tensor from_kept_pages(const at::Tensor& like, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &ResultAllocator::instance(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      like.scalar_type()));
}

}  // namespace

at::Tensor empty_result(const at::Tensor& like, at::IntArrayRef sizes) {
  if (!is_kept(like, c10::multiply_integers(sizes))) return at::empty(sizes, like.options());
  return from_kept_pages(like, sizes, c10::contiguous_strides(sizes));
}

at::Tensor empty_result_like(const at::Tensor& like) {
  if (lack_of_memory(like)) return like;  // for the request, which refuses it
  if (!is_kept(like, like.numel()) || !like.is_non_overlapping_and_dense()) {
    return at::empty_like(like);
  }
  return from_kept_pages(like, like.sizes(), like.strides());
}

void keep_results(std::size_t most_bytes) { ResultAllocator::instance().pages().limit(most_bytes); }

std::size_t kept_result_bytes() { return ResultAllocator::instance().pages().kept_bytes(); }

}  // namespace torch_ring
