// The hooks of an accumulator: autograd's calls before and after it adds to a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace torch::autograd {
struct Node;
}

namespace torch_ring {

class GradientHooks;

/// Hooks an accumulator, unless it is hooked already.
/// Thread: the one that runs the accumulator.
void hook_accumulator(const std::weak_ptr<GradientHooks>& hooks, std::size_t index,
                      torch::autograd::Node& accumulator);

/// Makes autograd call parameter `index` of `hooks` before and after it accumulates its gradient.
///
/// torch makes a new accumulator for a parameter that has changed its dtype or device, as in
/// `model.half().float()`. So the parameter itself has a hook, too, which hooks a new accumulator
/// when it first runs.
///
/// The hooks do nothing once `hooks` is gone. Under compiled autograd they raise an error with
/// advice. Thread: any, but not during a backward pass of the parameter.
void hook_parameter(const std::weak_ptr<GradientHooks>& hooks, std::size_t index,
                    const at::Tensor& parameter, torch::autograd::Node& accumulator);

}  // namespace torch_ring
