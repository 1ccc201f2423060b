#include "bindings/gradients.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_ring {
namespace {

namespace py = pybind11;
using torch::autograd::variable_list;

/// What the Python exception of that name is to autograd.
struct AssertionError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_AssertionError; }
};

/// A Python function for autograd's threads: autograd carries its exception to backward()'s caller.
template <class... Args>
std::function<void(Args...)> callback(py::object function) {
  if (function.is_none()) return {};
  const std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* it) {
    const py::gil_scoped_acquire gil;  // the last reference may be an autograd thread's
    delete it;
  });
  return [held](Args... args) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(args...);
    } catch (py::error_already_set& error) {
      error.restore();
      python_error for_autograd;
      for_autograd.persist();
      throw for_autograd;
    }
  };
}

bool get(const std::string& bitmap, std::size_t i) {
  return (static_cast<unsigned char>(bitmap.at(i / 8)) >> (i % 8)) & 1;
}

void set(std::string& bitmap, std::size_t i) {
  bitmap[i / 8] = static_cast<char>(bitmap[i / 8] | (1 << (i % 8)));
}

/// The tensor over `bucket`'s memory from element `offset` on that serves as `variable.grad`. It is
/// no view to autograd, and no more than its own elements are saved or copied with it.
at::Tensor place_in(const at::Tensor& bucket, std::int64_t offset, const at::Tensor& variable) {
  auto* const data = static_cast<std::byte*>(bucket.data_ptr()) + offset * bucket.element_size();
  const auto strides = variable.is_non_overlapping_and_dense()
                           ? c10::DimVector(variable.strides())
                           : c10::contiguous_strides(variable.sizes());
  const auto dtype =
      variable.is_complex() ? c10::toComplexType(bucket.scalar_type()) : bucket.scalar_type();
  return at::from_blob(
      data, variable.sizes(), strides, [owner = bucket](void*) {}, bucket.options().dtype(dtype),
      bucket.device());
}

void copy_into(const at::Tensor& to, const at::Tensor& from) {
  const bool same_layout = from.is_cpu() && from.scalar_type() == to.scalar_type() &&
                           from.strides() == to.strides() && !from.is_neg() && !from.is_conj();
  if (same_layout) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    const at::NoGradGuard no_grad;  // with create_graph=True the gradient has a graph
    to.copy_(from);
  }
}

}  // namespace

class GradientHooks::Before final : public torch::autograd::FunctionPreHook {
 public:
  Before(std::weak_ptr<GradientHooks> hooks, std::size_t index)
      : hooks_(std::move(hooks)), index_(index) {}

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = hooks_.lock();
    if (hooks && grads[0].defined()) hooks->before_accumulation(index_);
    return grads;
  }

 private:
  const std::weak_ptr<GradientHooks> hooks_;
  const std::size_t index_;
};

class GradientHooks::After final : public torch::autograd::FunctionPostHook {
 public:
  After(std::weak_ptr<GradientHooks> hooks, std::size_t index)
      : hooks_(std::move(hooks)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& grads) override {
    const auto hooks = hooks_.lock();
    if (hooks && grads[0].defined()) hooks->after_accumulation(index_);
    return outputs;
  }

 private:
  const std::weak_ptr<GradientHooks> hooks_;
  const std::size_t index_;
};

/// Ends the pass in which it was made: when autograd calls it, or, without a word to Python, when
/// autograd drops it because the pass has failed.
class GradientHooks::PassEnd {
 public:
  explicit PassEnd(std::weak_ptr<GradientHooks> hooks) : hooks_(std::move(hooks)) {}
  PassEnd(const PassEnd&) = delete;
  PassEnd& operator=(const PassEnd&) = delete;
  ~PassEnd() { close(); }

  void run() {
    struct Close {
      PassEnd& end;
      ~Close() { end.close(); }
    } const close{*this};
    if (const auto hooks = hooks_.lock()) hooks->options_.on_backward_end();
  }

 private:
  void close() {
    if (const auto hooks = std::exchange(hooks_, {}).lock()) hooks->end_pass();
  }

  std::weak_ptr<GradientHooks> hooks_;
};

std::shared_ptr<GradientHooks> GradientHooks::make(std::vector<at::Tensor> parameters,
                                                   std::vector<std::string> names,
                                                   Options options) {
  std::shared_ptr<GradientHooks> hooks(
      new GradientHooks(std::move(parameters), std::move(names), std::move(options)));
  hooks->add_hooks();
  return hooks;
}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                             Options options)
    : options_(std::move(options)) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter parameter;
    parameter.variable = std::move(parameters[i]);
    parameter.name = std::move(names.at(i));
    const bool frozen = !parameter.variable.requires_grad();
    if (frozen) parameter.variable.set_requires_grad(true);  // or it has no accumulator
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.variable);
    if (frozen) parameter.variable.set_requires_grad(false);
    parameters_.push_back(std::move(parameter));
  }
}

void GradientHooks::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& accumulator = *parameters_[i].accumulator;
    accumulator.add_post_hook(std::make_unique<After>(weak_from_this(), i));
    if (options_.reduced_scale != 1.0) {
      accumulator.add_pre_hook(std::make_unique<Before>(weak_from_this(), i));
    }
  }
}

void GradientHooks::place(const std::vector<at::Tensor>& buckets, const std::vector<Slot>& slots) {
  const std::scoped_lock lock(mutex_);
  missing_.assign(buckets.size(), 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const auto [bucket, offset] = slots.at(i);
    const at::Tensor before =
        std::exchange(parameter.view, place_in(buckets.at(bucket), offset, parameter.variable));
    parameter.bucket = bucket;
    ++missing_[bucket];
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (before.defined() && grad.is_same(before)) {
      copy_into(parameter.view, before);
      grad = parameter.view;
    }
  }
}

void GradientHooks::before_accumulation(std::size_t index) {
  if (disabled_) return;
  const std::scoped_lock lock(mutex_);
  discount(parameters_[index]);
}

void GradientHooks::after_accumulation(std::size_t index) {
  if (disabled_) return;
  bool bucket_full = false;
  std::size_t bucket = 0;
  {
    const std::scoped_lock lock(mutex_);
    Parameter& parameter = parameters_[index];
    if (!parameter.variable.mutable_grad().defined()) return;  // another hook has consumed it
    bucket_full = count_arrival(index, move_in(parameter));
    bucket = parameter.bucket;
  }
  if (!pass_open_.exchange(true)) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<PassEnd>(weak_from_this())] { end->run(); });
  }
  if (bucket_full) options_.on_bucket_full(bucket);
}

/// Returns whether the bucket is full now and is to be announced.
bool GradientHooks::count_arrival(std::size_t index, bool fresh) {
  Parameter& parameter = parameters_[index];
  if (fresh) parameter.passes = 0;  // whatever had been accumulated was dropped
  if (fresh) parameter.base_reduced = false;
  if (passes_per_step_ > 1 && due(parameter) && !parameter.held) {
    throw AssertionError(c10::str(
        "the gradient of '", parameter.name, "' was computed more than backward_passes_per_step=",
        passes_per_step_, " times before step(): raise backward_passes_per_step, or call step() ",
        "or zero_grad() in between"));
  }
  ++parameter.passes;
  parameter.held = true;
  if (std::exchange(parameter.arrived, true)) {
    TORCH_CHECK(!options_.on_bucket_full || missing_[parameter.bucket] > 0, "'", parameter.name,
                "' got another gradient in a backward pass that had already sent ",
                "its first one: use torch.utils.checkpoint with use_reentrant=False");
    return false;
  }
  arrived_.push_back(index);
  if (!synchronizing_ || !due(parameter)) return false;
  return --missing_[parameter.bucket] == 0 && options_.on_bucket_full;
}

void GradientHooks::end_pass() {
  const std::scoped_lock lock(mutex_);
  arrived_.clear();
  std::fill(missing_.begin(), missing_.end(), 0);
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
    ++missing_[parameter.bucket];
  }
  pass_open_ = false;
}

GradientHooks::Pending GradientHooks::pending(bool everything) {
  const std::scoped_lock lock(mutex_);
  Pending pending{Bitmap((parameters_.size() + 7) / 8, '\0'), false};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& grad = parameter.variable.mutable_grad();
    if (!grad.defined()) parameter.held = false;  // zero_grad() of the model, not ours
    const bool here =
        parameter.held || (everything && grad.defined() && !grad.is_same(parameter.view));
    if (!here) continue;
    if (everything || (synchronizing_ && due(parameter))) {
      set(pending.due, i);
    } else {
      pending.held_back = true;
    }
  }
  return pending;
}

void GradientHooks::adopt(const Bitmap& touched) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(touched, i)) continue;
    Parameter& parameter = parameters_[i];
    at::Tensor& grad = parameter.variable.mutable_grad();
    if (parameter.arrived) {
      grad = parameter.view;  // it may be on its way already, whatever `grad` was set to since
    } else if (!grad.defined()) {
      parameter.view.zero_();
      grad = parameter.view;
    } else if (!move_in(parameter) && !parameter.held) {
      discount(parameter);
    }
  }
}

void GradientHooks::reduced(const Bitmap& touched) {
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!get(touched, i)) continue;
    parameters_[i].held = false;
    parameters_[i].base_reduced = true;
  }
}

std::vector<std::size_t> GradientHooks::ready_order() {
  const std::scoped_lock lock(mutex_);
  return arrived_;
}

void GradientHooks::restart(bool gradients) {
  const std::scoped_lock lock(mutex_);
  for (Parameter& parameter : parameters_) {
    parameter.passes = 0;
    if (gradients) parameter.held = parameter.base_reduced = false;
  }
}

void GradientHooks::set_passes_per_step(int passes) {
  const std::scoped_lock lock(mutex_);
  passes_per_step_ = passes;
}

void GradientHooks::set_synchronizing(bool synchronizing) {
  const std::scoped_lock lock(mutex_);
  synchronizing_ = synchronizing;
}

void GradientHooks::disable() { disabled_ = true; }

/// Makes `grad` the place in the bucket, with its value; returns whether it was elsewhere.
bool GradientHooks::move_in(Parameter& parameter) {
  at::Tensor& grad = parameter.variable.mutable_grad();
  if (grad.is_same(parameter.view)) return false;
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided, "parameter '", parameter.name,
                    "' has a sparse gradient, which cannot be reduced: make it dense, for an "
                    "Embedding with sparse=False");
  TORCH_CHECK_VALUE(grad.sizes() == parameter.view.sizes(), "parameter '", parameter.name,
                    "' has changed its shape from ", parameter.view.sizes(), " to ", grad.sizes(),
                    " since the optimizer was wrapped: wrap it again");
  copy_into(parameter.view, grad);
  grad = parameter.view;
  return true;
}

/// Sum counts what is equal on all ranks once (Options::reduced_scale).
void GradientHooks::discount(Parameter& parameter) {
  if (options_.reduced_scale == 1.0 || parameter.held || !parameter.base_reduced) return;
  at::Tensor& grad = parameter.variable.mutable_grad();
  if (!grad.is_same(parameter.view)) return;
  const at::NoGradGuard no_grad;
  grad.mul_(options_.reduced_scale);
  parameter.base_reduced = false;
}

void bind_gradients(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GradientHooks, std::shared_ptr<GradientHooks>>(module, "GradientHooks")
      .def(
          py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                      double reduced_scale, py::object on_backward_end, py::object on_bucket_full) {
            return GradientHooks::make(std::move(parameters), std::move(names),
                                       {reduced_scale, callback<>(std::move(on_backward_end)),
                                        callback<std::size_t>(std::move(on_bucket_full))});
          }),
          py::arg("parameters"), py::arg("names"), py::kw_only(), py::arg("reduced_scale"),
          py::arg("on_backward_end"), py::arg("on_bucket_full"))
      .def(
          "place",
          [](GradientHooks& hooks, const std::vector<at::Tensor>& buckets,
             const std::vector<std::pair<std::size_t, std::int64_t>>& slots) {
            std::vector<GradientHooks::Slot> placed;
            for (const auto& [bucket, offset] : slots) placed.push_back({bucket, offset});
            hooks.place(buckets, placed);
          },
          py::arg("buckets"), py::arg("slots"), Release())
      .def(
          "pending",
          [](GradientHooks& hooks, bool everything) {
            GradientHooks::Pending pending;
            {
              const py::gil_scoped_release release;
              pending = hooks.pending(everything);
            }
            return std::pair(py::bytes(pending.due), pending.held_back);
          },
          py::arg("everything"))
      .def("adopt", &GradientHooks::adopt, py::arg("touched"), Release())
      .def("reduced", &GradientHooks::reduced, py::arg("touched"), Release())
      .def("ready_order", &GradientHooks::ready_order, Release())
      .def("restart", &GradientHooks::restart, py::kw_only(), py::arg("gradients"), Release())
      .def("set_passes_per_step", &GradientHooks::set_passes_per_step, py::arg("passes"), Release())
      .def("set_synchronizing", &GradientHooks::set_synchronizing, py::arg("synchronizing"),
           Release())
      .def("disable", &GradientHooks::disable);
}

}  // namespace torch_ring
