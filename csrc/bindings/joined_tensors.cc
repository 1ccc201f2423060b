#include "bindings/joined_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>

#include <cstring>
#include <string>

#include "bindings/c10d_checks.h"
#include "bindings/requests.h"
#include "bindings/result_allocator.h"
#include "bindings/streams.h"
#include "bindings/tensor_memory.h"

namespace torch_ring {

namespace {

std::int64_t elements_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return count;
}

/// The memory of tensors that lie one after the other in one storage; undefined if they do not.
at::Tensor flat_over(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  std::int64_t offset = first.storage_offset();
  for (const at::Tensor& tensor : tensors) {
    if (!is_plain(tensor) || tensor.storage_offset() != offset || !tensor.is_alias_of(first)) {
      return {};
    }
    offset += tensor.numel();
  }
  return first.detach().as_strided({elements_of(tensors)}, {1}, first.storage_offset());
}

void copy(const at::Tensor& to, const at::Tensor& from) {
  // Not by torch's copy_(): its threads would compete with the program's, and these copies run on
  // the progress thread.
  if (to.is_cpu() && from.is_cpu() && is_plain(to) && is_plain(from)) {
    if (to.nbytes() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from.view(to.sizes()));
  }
}

}  // namespace

JoinedTensors::JoinedTensors(std::vector<at::Tensor> tensors, const char* what)
    : tensors_(std::move(tensors)) {
  if (tensors_.empty()) refuse(std::string(what) + ": the list of tensors is empty");
  const at::Tensor& first = tensors_.front();
  for (const at::Tensor& tensor : tensors_) {
    check_tensor(tensor, what);
    if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device()) {
      refuse(std::string(what) + ": the tensors of a list differ in dtype or device");
    }
  }
}

JoinedTensors JoinedTensors::inputs(const std::vector<at::Tensor>& tensors, const char* what) {
  const at::NoGradGuard no_grad;
  JoinedTensors joined(tensors, what);
  joined.flat_ = flat_over(joined.tensors_);
  joined.is_new_ = !joined.flat_.defined();
  if (!joined.is_new_) return joined;
  joined.flat_ = empty_result(tensors.front(), {elements_of(tensors)});
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = values_of(tensor.detach());
    copy(joined.flat_.narrow(0, offset, values.numel()), values.view({values.numel()}));
    offset += values.numel();
  }
  joined.tensors_.clear();
  return joined;
}

JoinedTensors JoinedTensors::outputs(const std::vector<at::Tensor>& tensors, const char* what,
                                     const at::Tensor* overlaps) {
  const at::NoGradGuard no_grad;
  JoinedTensors joined(tensors, what);
  for (at::Tensor& tensor : joined.tensors_) {
    check_writable(tensor, what);
    tensor = tensor.detach();
  }
  joined.flat_ = flat_over(joined.tensors_);
  joined.is_new_ = !joined.flat_.defined() || (overlaps && may_overlap(joined.flat_, *overlaps));
  if (joined.is_new_) joined.flat_ = empty_result(tensors.front(), {elements_of(tensors)});
  return joined;
}

void JoinedTensors::write_back() const {
  if (!is_new_) return;
  const ForCaller for_caller(tensors_.front().is_inference());
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors_) {
    copy(tensor, flat_.narrow(0, offset, tensor.numel()));
    offset += tensor.numel();
  }
}

bool may_overlap(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0 || !one.is_alias_of(other)) return false;
  if (!one.is_contiguous() || !other.is_contiguous()) return true;
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  return begin(one) < begin(other) + other.nbytes() && begin(other) < begin(one) + one.nbytes();
}

}  // namespace torch_ring
