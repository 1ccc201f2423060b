// SPDX-License-Identifier: Apache-2.0
#include "bindings/sparse_sum.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstddef>
#include <span>
#include <utility>

#include "core/error.h"

namespace torch_ring {

namespace {

constexpr std::int64_t kFixedWords = 4;  // of a header, before the shape

std::vector<std::int64_t> numbers_of(const at::Tensor& tensor) {
  const at::Tensor host = tensor.cpu();
  const std::span numbers(host.const_data_ptr<std::int64_t>(),
                          static_cast<std::size_t>(host.numel()));
  return {numbers.begin(), numbers.end()};
}

/// The header from one rank.
struct Part {
  Part(int rank, const at::Tensor& sent) : rank(rank) {
    const std::vector<std::int64_t> fixed = numbers_of(sent.narrow(0, 0, kFixedWords));
    const std::vector<std::int64_t> shape = numbers_of(sent.narrow(0, kFixedWords, fixed[3]));
    indices = sent.slice(0, kFixedWords + fixed[3]).view({fixed[0], fixed[1]});
    request = std::string(name_of(static_cast<ReduceOp>(fixed[2]))) + " of [";
    for (std::size_t i = 0; i < shape.size(); ++i) {
      request += (i > 0 ? ", " : "") + std::to_string(shape[i]);
    }
    request += "]";
    sparse_dim = "sparse_dim " + std::to_string(fixed[0]);
  }

  int rank;
  at::Tensor indices;  // [sparse_dim, nnz]
  std::string request;
  std::string sparse_dim;
};

void require_same(const std::string& what, const Part& one, const std::string& asked,
                  const Part& other, const std::string& other_asked) {
  if (asked == other_asked) return;
  throw Error(ErrorKind::kMismatch, what + ": the ranks disagree: rank " +
                                        std::to_string(one.rank) + ": " + asked + "; rank " +
                                        std::to_string(other.rank) + ": " + other_asked);
}

}  // namespace

SparseMessage sparse_message(const std::optional<at::Tensor>& own, const at::Tensor& like,
                             ReduceOp op) {
  const at::TensorOptions dense = like.options().layout(at::kStrided).requires_grad(false);
  const at::TensorOptions words = dense.dtype(at::kLong);
  if (!own) return {at::empty({0}, words), at::empty({0}, dense)};
  const at::Tensor indices = own->_indices();
  std::vector<std::int64_t> begin{indices.size(0), indices.size(1), static_cast<std::int64_t>(op),
                                  own->dim()};
  begin.insert(begin.end(), own->sizes().begin(), own->sizes().end());
  return {at::cat({at::tensor(begin, words), indices.flatten()}),
          own->_values().detach().flatten()};
}

at::Tensor sparse_sum(const std::string& what, ReduceOp op, const at::Tensor& like,
                      const std::vector<int>& ranks, const GatheredSparse& gathered,
                      std::optional<bool> is_coalesced) {
  std::vector<Part> parts;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < gathered.lengths.size(); ++i) {
    const std::int64_t length = gathered.lengths[i];
    if (length > 0) parts.emplace_back(ranks.at(i), gathered.headers.narrow(0, begin, length));
    begin += length;
  }
  std::vector<at::Tensor> indices;
  for (const Part& part : parts) {
    require_same(what, parts.front(), parts.front().request, part, part.request);
    require_same(what, parts.front(), parts.front().sparse_dim, part, part.sparse_dim);
    indices.push_back(part.indices);
  }
  at::Tensor values = gathered.values;
  if (op == ReduceOp::kAverage) {
    const at::Scalar size(static_cast<std::int64_t>(ranks.size()));
    const bool is_whole = at::isIntegralType(values.scalar_type(), /*includeBool=*/true);
    values = is_whole ? at::div(values, size, "trunc") : at::div(values, size);
  }
  const at::Tensor joined = at::cat(indices, 1);
  const std::int64_t sparse_dim = joined.size(0);
  std::vector<std::int64_t> shape = like.sizes().slice(static_cast<std::size_t>(sparse_dim)).vec();
  shape.insert(shape.begin(), joined.size(1));
  return at::_sparse_coo_tensor_with_dims_and_tensors(
      sparse_dim, like.dim() - sparse_dim, like.sizes(), joined, values.view(shape),
      values.options().layout(at::kSparse), is_coalesced);
}

}  // namespace torch_ring
