// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "bindings/requests.h"
#include "core/home_process.h"
#include "engine/request.h"

namespace torch_ring {

using Tensors = std::vector<at::Tensor>;

/// `what` begins the message of each. Errors: Error(kInvalidArgument).

/// Refuses to work in a forked child.
void refuse_in_child_of(const HomeProcess& home);

void require_as_many(const char* what, std::size_t outputs, std::size_t inputs);

/// One part for each rank.
void require_size(const char* what, std::size_t parts, int size);

/// The dtype and device of `whole`.
void require_like(const char* what, const at::Tensor& part, const at::Tensor& whole);

/// One part for each rank, each with the dtype, device and number of elements of `own`.
void require_parts(const char* what, const Tensors& parts, const at::Tensor& own, int size);

/// Several tensors of one dtype and device as one flat tensor: over their own memory if they lie
/// there one after the other, otherwise over new memory.
class JoinedTensors {
 public:
  /// With the tensors' values. Errors: Error(kInvalidArgument); `what` begins the message.
  static JoinedTensors inputs(const std::vector<at::Tensor>& tensors, const char* what);

  /// Without values; write_back() copies them to the tensors.
  /// `overlaps`: a tensor that is read while the memory is written; if they would share memory, the
  /// memory is new.
  static JoinedTensors outputs(const std::vector<at::Tensor>& tensors, const char* what,
                               const at::Tensor* overlaps = nullptr);

  const at::Tensor& flat() const { return flat_; }

  /// Copies the memory to the tensors, if it is not their own.
  void write_back() const;

 private:
  JoinedTensors(std::vector<at::Tensor> tensors, const char* what);

  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
  bool is_new_ = true;
};

/// Whether the two tensors may share memory. For contiguous ones: exactly.
bool may_overlap(const at::Tensor& one, const at::Tensor& other);

/// An error that this rank finds while an operation runs, too late to refuse it: the received data
/// does not fit its tensors. It does not end the group.
class LateError {
 public:
  void set(Error error) {
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  void check() const {
    const std::scoped_lock lock(mutex_);
    if (error_) throw Error(*error_);
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

/// One operation of torch.distributed.
struct C10dOperation {
  std::vector<Request> requests;    // without names: the ranks match them by their order
  std::vector<at::Tensor> outputs;  // the value of its future
  std::shared_ptr<LateError> late_error = {};
};

using TensorLists = std::vector<Tensors>;

/// The operations of torch.distributed. Each checks its tensors, keeps them alive until its
/// requests are done, and copies to and from contiguous memory where necessary: several tensors
/// that lie one after the other in memory are not copied. Tensors have any shape, 0 dimensions and
/// 0 elements included; their shapes and dtypes must be the same on all ranks, which the engine
/// checks.
/// Errors: Error(kInvalidArgument).

/// Each tensor becomes its reduction. One request for each tensor; the engine may fuse them.
C10dOperation allreduce_operation(const Tensors& tensors, const c10d::ReduceOp& op, Place place);

/// The sparse (COO) tensor becomes the sum over the ranks, which may have different indices.
/// Two allgathers: of the indices, and of the values. Only SUM.
C10dOperation sparse_allreduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                         Place place);

/// Each tensor becomes the tensor of rank `root`.
C10dOperation broadcast_operation(const Tensors& tensors, int root, Place place);

/// The tensor of rank `root` becomes the reduction; the others' stay unchanged.
C10dOperation reduce_operation(const at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                               Place place);

/// On rank `root`, outputs[r] becomes the input of rank r; elsewhere there are no outputs.
C10dOperation gather_operation(const Tensors& outputs, const at::Tensor& input, int root,
                               Place place);

/// The output becomes inputs[rank] of rank `root`; elsewhere there are no inputs.
C10dOperation scatter_operation(const at::Tensor& output, const Tensors& inputs, int root,
                                Place place);

/// outputs[i][r] becomes inputs[i] of rank r.
C10dOperation allgather_operation(const TensorLists& outputs, const Tensors& inputs, Place place);

/// outputs[i] becomes inputs[i] of all ranks, one after the other.
C10dOperation allgather_into_operation(const Tensors& outputs, const Tensors& inputs, Place place);

/// outputs[i] becomes this rank's part of the reduction of inputs[i], which has one for each rank.
C10dOperation reduce_scatter_operation(const Tensors& outputs, const TensorLists& inputs,
                                       const c10d::ReduceOp& op, Place place);

/// The same; inputs[i] holds the parts one after the other.
C10dOperation reduce_scatter_into_operation(const Tensors& outputs, const Tensors& inputs,
                                            const c10d::ReduceOp& op, Place place);

/// outputs[r] becomes inputs[rank] of rank r. The tensors may differ in size.
C10dOperation alltoall_operation(const Tensors& outputs, const Tensors& inputs, Place place);

/// `output` becomes the rows that the ranks send to this one, in the order of ranks. The splits:
/// the numbers of rows for, or from, each rank; empty: equal numbers.
C10dOperation alltoall_into_operation(const at::Tensor& output, const at::Tensor& input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, Place place);

/// Done when all ranks have called it.
C10dOperation barrier_operation(Place place);

}  // namespace torch_ring
