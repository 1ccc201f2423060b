// SPDX-License-Identifier: Apache-2.0
#include "gradients/finite_check.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "bindings/dtypes.h"

namespace torch_ring {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Whether the elements of a tensor on the host are exactly those of its memory, in any order.
bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

/// The worst of numbers with this largest magnitude, which may be NaN.
Worst worst_of(double largest, double limit) {
  return std::isnan(largest)   ? Worst::kNaN
         : std::isinf(largest) ? Worst::kInfinite
         : largest > limit     ? Worst::kLarge
                               : Worst::kFinite;
}

/// The stored numbers of a sparse tensor; another tensor as it is.
at::Tensor stored_numbers(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kSparse:
      return tensor._values();
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return tensor.values();
    default:
      return tensor;
  }
}

/// The worst of a gradient's numbers; nullopt for a dense one on a device, which is replaced by its
/// real numbers. A sparse one is not compressed, so only its dtype limits it.
std::optional<Worst> worst_on_host(at::Tensor& values, double limit) {
  const bool is_sparse = values.layout() != at::kStrided;
  if (is_sparse) {
    values = stored_numbers(values);
    limit = kInfinity;
  }
  if (values.layout() != at::kStrided || values.numel() == 0) return Worst::kFinite;
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  if (!values.is_cpu() && !is_sparse) return std::nullopt;
  if (values.is_cpu() && has_plain_memory(values)) {
    const auto count = static_cast<std::size_t>(values.numel());
    return worst_of(values.const_data_ptr(), count, dtype_of(values), limit);
  }
  return worst_of(at::linalg_vector_norm(values, kInfinity).item<double>(), limit);
}

}  // namespace

void FiniteCheck::examine(const std::vector<HookedParameter>& parameters,
                          const std::vector<std::size_t>& indices) {
  const at::NoGradGuard no_grad;
  examined_.resize(parameters.size());
  worst_.resize(parameters.size(), Worst::kFinite);
  for (const std::size_t i : indices) {
    examined_[i] = true;
    for (at::Tensor values : {parameters[i].to_send(), parameters[i].averaged.value()}) {
      if (!values.defined()) continue;
      if (const auto worst = worst_on_host(values, *largest_)) {
        worst_[i] = std::max(worst_[i], *worst);
        continue;
      }
      OnDevice& others = on_device_[values.scalar_type()];
      others.parameters.push_back(i);
      others.gradients.push_back(values);
    }
  }
  for (auto& [dtype, others] : on_device_) {
    if (others.gradients.empty()) continue;
    const auto largest = at::_foreach_norm(std::exchange(others.gradients, {}), kInfinity);
    others.largest.insert(others.largest.end(), largest.begin(), largest.end());
  }
}

std::vector<NotFinite> FiniteCheck::not_finite(std::vector<HookedParameter>& parameters,
                                               const Bitmap& due, int rank) const {
  if (!is_on()) return {};
  std::vector<std::size_t> rest;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!due.get(i) || has(i)) continue;
    parameters[i].refresh();
    rest.push_back(i);
  }
  FiniteCheck all = *this;
  all.examine(parameters, rest);
  for (const auto& [dtype, on_device] : all.on_device_) {
    const at::Tensor largest = at::stack(on_device.largest).to(at::kCPU, at::kDouble);
    const auto* const values = largest.const_data_ptr<double>();
    for (std::size_t k = 0; k < on_device.parameters.size(); ++k) {
      Worst& worst = all.worst_[on_device.parameters[k]];
      worst = std::max(worst, worst_of(values[k], *largest_));
    }
  }
  std::vector<NotFinite> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!due.get(i) || !all.has(i) || all.worst_[i] == Worst::kFinite) continue;
    found.push_back({i, rank, all.worst_[i], parameters[i].averaged.value().defined()});
  }
  return found;
}

void FiniteCheck::forget() {
  if (is_on()) *this = FiniteCheck(largest_);
}

std::vector<Worst> FiniteCheck::worst_numbers(std::vector<at::Tensor> tensors) {
  const at::NoGradGuard no_grad;
  std::vector<Worst> found;
  for (at::Tensor& values : tensors) {
    const std::optional<Worst> on_host = worst_on_host(values, kInfinity);
    found.push_back(
        on_host ? *on_host
                : worst_of(at::linalg_vector_norm(values, kInfinity).item<double>(), kInfinity));
  }
  return found;
}

}  // namespace torch_ring
