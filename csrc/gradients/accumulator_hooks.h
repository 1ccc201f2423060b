// hook_parameter(): what autograd calls when it accumulates the gradient of a parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>

namespace torch_ring {

/// The node that accumulates the gradient of a parameter. The kind of pointer depends on torch's
/// version.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

/// Parameters whose gradients autograd accumulates. They are known by their index.
/// Thread: any. Errors: they come out of backward().
class AccumulationObserver {
 public:
  virtual void before_accumulation(std::size_t index) = 0;

  virtual void after_accumulation(std::size_t index, const at::Tensor& gradient) = 0;

  /// A parameter has another accumulator. Returns whether that is hooked now.
  virtual bool follow(std::size_t index, const Accumulator& accumulator) = 0;

 protected:
  ~AccumulationObserver() = default;
};

/// Makes autograd call parameter `index` of `hooks` before and after it accumulates its gradient.
///
/// torch makes a new accumulator for a parameter that has changed its dtype or device, as in
/// `model.half().float()`. So the parameter itself has a hook too, which hooks a new accumulator
/// when that runs for the first time.
///
/// The hooks do nothing once `hooks` is gone. Compiled autograd gets an error that says what to do.
/// Thread: any, but not during a backward pass of the parameter.
void hook_parameter(const std::weak_ptr<AccumulationObserver>& hooks, std::size_t index,
                    const at::Tensor& parameter, torch::autograd::Node& accumulator);

/// Hooks an accumulator, unless it is hooked already.
/// Thread: the one that runs the accumulator.
void hook_accumulator(const std::weak_ptr<AccumulationObserver>& hooks, std::size_t index,
                      torch::autograd::Node& accumulator);

}  // namespace torch_ring
