// SPDX-License-Identifier: Apache-2.0
#include "gradients/accumulator_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "gradients/python_errors.h"

namespace torch_ring {

namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

[[noreturn]] void refuse_compiled_autograd() {
  throw_runtime_error(
      "DistributedOptimizer reduces gradients while autograd computes them, which compiled "
      "autograd does not allow: run backward() without it (torch._dynamo.config.compiled_autograd "
      "= False). torch.compile(model) works without it");
}

/// One parameter of a listener that may be gone.
struct Owner {
  std::weak_ptr<AccumulationListener> listener;
  std::size_t index;

  bool operator==(const Owner& other) const {
    return index == other.index && !listener.owner_before(other.listener) &&
           !other.listener.owner_before(listener);
  }
};

class Before final : public FunctionPreHook {
 public:
  explicit Before(Owner owner) : owner_(std::move(owner)) {}

  variable_list operator()(const variable_list& grads) override {
    const auto listener = owner_.listener.lock();
    if (listener && grads[0].defined()) listener->before_accumulation(owner_.index);
    return grads;
  }

  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

 private:
  const Owner owner_;
};

class After final : public FunctionPostHook {
 public:
  explicit After(Owner owner) : owner_(std::move(owner)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& grads) override {
    const auto listener = owner_.listener.lock();
    if (listener && grads[0].defined()) listener->after_accumulation(owner_.index, grads[0]);
    return outputs;
  }

  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  bool is_of(const Owner& owner) const { return owner_ == owner; }

 private:
  const Owner owner_;
};

/// The hook of the parameter itself. Autograd calls it before the hooks of the accumulator, to
/// which hooks can be added until then; also if it only captures the gradient
/// (torch.autograd.grad). If the program calls register_hook() on the parameter, torch removes this
/// hook and keeps only the program's.
class OnParameter final : public FunctionPreHook {
 public:
  OnParameter(Owner owner, const Node* hooked) : owner_(std::move(owner)), hooked_(hooked) {}

  variable_list operator()(const variable_list& grads) override {
    const auto listener = owner_.listener.lock();
    if (!listener) return grads;
    const auto node = torch::autograd::get_current_node();
    if (node && node.get() != hooked_.load(std::memory_order_relaxed)) {
      const bool accumulates =
          dynamic_cast<torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
      if (accumulates && listener->follow(owner_.index, node)) hooked_ = node.get();
    }
    return grads;
  }

  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  bool is_idle() const { return owner_.listener.expired(); }

 private:
  const Owner owner_;
  // The accumulator in the parameter's HookedParameter, which keeps it alive. Guards no data.
  std::atomic<const Node*> hooked_;
};

}  // namespace

void hook_accumulator(const std::weak_ptr<AccumulationListener>& listener, std::size_t index,
                      Node& accumulator) {
  const Owner owner{listener, index};
  const auto& present = accumulator.post_hooks();
  const bool is_hooked = std::any_of(present.begin(), present.end(), [&](const auto& other) {
    const auto* const ours = dynamic_cast<const After*>(other.get());
    return ours != nullptr && ours->is_of(owner);
  });
  if (is_hooked) return;
  accumulator.add_post_hook(std::make_unique<After>(owner));
  accumulator.add_pre_hook(std::make_unique<Before>(owner));
}

void hook_parameter(const std::weak_ptr<AccumulationListener>& listener, std::size_t index,
                    const at::Tensor& parameter, Node& accumulator) {
  hook_accumulator(listener, index, accumulator);
  auto hook = std::make_unique<OnParameter>(Owner{listener, index}, &accumulator);
  auto& present = torch::autograd::impl::hooks(parameter);
  // Reuses the place of a hook whose optimizer is gone, so that repeated wrapping adds no more of
  // them.
  const auto idle = std::find_if(present.begin(), present.end(), [](const auto& other) {
    const auto* const ours = dynamic_cast<const OnParameter*>(other.get());
    return ours != nullptr && ours->is_idle();
  });
  if (idle != present.end()) {
    *idle = std::move(hook);
  } else {
    present.push_back(std::move(hook));  // add_hook() would allow only one, the program's
  }
}

}  // namespace torch_ring
