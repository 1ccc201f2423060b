// JoinedTensors: several tensors as one piece of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ring {

/// Several tensors of one dtype and device as one flat tensor: their own memory where they lie one
/// after the other in it, and new memory else.
class JoinedTensors {
 public:
  /// With the tensors' values. Errors: Error(kInvalidArgument); `what` begins the message.
  static JoinedTensors inputs(const std::vector<at::Tensor>& tensors, const char* what);

  /// Without values; write_back() copies them to the tensors.
  /// `overlaps`: a tensor that is read while the memory is written. It must not share memory with
  /// it: then the memory is new.
  static JoinedTensors outputs(const std::vector<at::Tensor>& tensors, const char* what,
                               const at::Tensor* overlaps = nullptr);

  const at::Tensor& flat() const { return flat_; }

  /// Copies the memory to the tensors, if it is not theirs.
  void write_back() const;

 private:
  JoinedTensors(std::vector<at::Tensor> tensors, const char* what);

  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
  bool is_new_ = true;
};

/// Whether the two tensors may share memory. For contiguous ones: exactly.
bool may_overlap(const at::Tensor& one, const at::Tensor& other);

}  // namespace torch_ring
