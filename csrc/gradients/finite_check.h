// SPDX-License-Identifier: Apache-2.0
// FiniteCheck: finds gradients with numbers that are not finite, before they are sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "core/finite.h"
#include "gradients/bitmap.h"
#include "gradients/hooked_parameter.h"
#include "gradients/report.h"

namespace torch_ring {

/// Examines gradients on each rank before they are averaged, because an average of a NaN is a NaN
/// on all ranks. A gradient whose bucket is sent in the middle of a pass is examined before that,
/// the others at the end of the pass.
///
/// Thread: one at a time. Blocking: not_finite() waits for devices.
class FiniteCheck {
 public:
  /// `largest`: a magnitude above this counts like an infinity; none: nothing is examined.
  explicit FiniteCheck(std::optional<double> largest) : largest_(largest) {}

  bool is_on() const { return largest_.has_value(); }

  /// Examines gradients that are about to be sent, and their averaged parts. On a device it
  /// enqueues their largest magnitudes on the current stream, which follows those on which they
  /// were made.
  void examine(const std::vector<HookedParameter>& parameters,
               const std::vector<std::size_t>& indices);

  /// The gradients of `due` that are not finite; examines those that were not. `rank`: this one.
  std::vector<NotFinite> not_finite(std::vector<HookedParameter>& parameters, const Bitmap& due,
                                    int rank) const;

  /// Forgets what was examined: the pass has ended.
  void forget();

  /// The worst number of each tensor. Waits for devices.
  static std::vector<Worst> worst_numbers(std::vector<at::Tensor> tensors);

 private:
  /// Gradients on a device, of one dtype, without results yet.
  struct OnDevice {
    std::vector<std::size_t> parameters;
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> largest;  // magnitudes; of the first ones
  };

  bool has(std::size_t i) const { return i < examined_.size() && examined_[i]; }

  std::optional<double> largest_;
  std::vector<bool> examined_;  // by parameter: also those in on_device_
  std::vector<Worst> worst_;    // by parameter; not yet of those in on_device_
  std::map<at::ScalarType, OnDevice> on_device_;
};

}  // namespace torch_ring
