// SPDX-License-Identifier: Apache-2.0
// The hooks of an accumulator: autograd's calls before and after it adds to a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace torch::autograd {
struct Node;
}

namespace torch_ring {

/// The node that accumulates the gradient of a parameter. The kind of pointer depends on torch's
/// version.
using Accumulator = std::remove_cvref_t<decltype(std::declval<at::Tensor>().grad_fn())>;

/// Is called by the hooks, in a thread of autograd. `index`: the parameter's.
class AccumulationListener {
 public:
  virtual ~AccumulationListener() = default;

  /// Autograd is about to add to a gradient, or to make one.
  virtual void before_accumulation(std::size_t index) = 0;

  /// Autograd has added `gradient`.
  virtual void after_accumulation(std::size_t index, const at::Tensor& gradient) = 0;

  /// A parameter has a new accumulator; returns whether the listener hooks that, too.
  virtual bool follow(std::size_t index, const Accumulator& accumulator) = 0;
};

/// Hooks an accumulator, unless it is hooked already.
/// Thread: the one that runs the accumulator.
void hook_accumulator(const std::weak_ptr<AccumulationListener>& listener, std::size_t index,
                      torch::autograd::Node& accumulator);

/// Makes autograd call the listener for parameter `index` before and after it accumulates its
/// gradient.
///
/// torch makes a new accumulator for a parameter that has changed its dtype or device, as in
/// `model.half().float()`. So the parameter itself has a hook, too, which hooks a new accumulator
/// when it first runs.
///
/// The hooks do nothing once the listener is gone. Under compiled autograd they raise an error with
/// advice. Thread: any, but not during a backward pass of the parameter.
void hook_parameter(const std::weak_ptr<AccumulationListener>& listener, std::size_t index,
                    const at::Tensor& parameter, torch::autograd::Node& accumulator);

}  // namespace torch_ring
