// SPDX-License-Identifier: Apache-2.0
// SparseMessage, sparse_sum(): the sum of the ranks' sparse tensors, for both APIs. Their rows are
// gathered and never made dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/types.h"

namespace torch_ring {

/// One rank's part of a sparse sum, for two allgathers.
struct SparseMessage {
  at::Tensor header;  // int64 [sparse_dim, nnz, op, dim, *shape, *indices]
  at::Tensor values;  // flat
};

/// `own`: sparse COO; none: this rank contributes nothing. `like`: has the dtype and device of the
/// sum.
SparseMessage sparse_message(const std::optional<at::Tensor>& own, const at::Tensor& like,
                             ReduceOp op);

/// The messages of all ranks, one after the other. A rank without a header contributes nothing.
struct GatheredSparse {
  const at::Tensor& headers;
  const std::vector<std::int64_t>& lengths;  // of the headers, by rank
  const at::Tensor& values;
};

/// The sum, an uncoalesced sparse COO tensor.
/// `what`: begins an error's text. `ranks`: the ranks in errors. `is_coalesced`: of the sum; none:
/// torch decides.
/// Errors: Error(kMismatch): the shapes or the operators of two ranks differ.
at::Tensor sparse_sum(const std::string& what, ReduceOp op, const at::Tensor& like,
                      const std::vector<int>& ranks, const GatheredSparse& gathered,
                      std::optional<bool> is_coalesced);

}  // namespace torch_ring
