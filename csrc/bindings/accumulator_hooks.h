// hook_parameter(): what autograd calls when it accumulates the gradient of a parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <memory>

namespace torch_ring {

class GradientHooks;

/// Makes autograd call parameter `index` of `hooks` before and after it accumulates its gradient.
///
/// torch makes a new accumulator for a parameter that has changed its dtype or device, as in
/// `model.half().float()`. So the parameter itself has a hook too, which hooks a new accumulator
/// when that runs for the first time.
///
/// The hooks do nothing once `hooks` is gone. Compiled autograd gets an error that says what to do.
/// Thread: any, but not during a backward pass of the parameter.
void hook_parameter(const std::weak_ptr<GradientHooks>& hooks, std::size_t index,
                    const at::Tensor& parameter, torch::autograd::Node& accumulator);

/// Hooks an accumulator, unless it is hooked already.
/// Thread: the one that runs the accumulator.
void hook_accumulator(const std::weak_ptr<GradientHooks>& hooks, std::size_t index,
                      torch::autograd::Node& accumulator);

}  // namespace torch_ring
