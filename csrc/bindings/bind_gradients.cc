#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/finalize_dense.h"
#include "bindings/gradient_hooks.h"

namespace torch_ring {
namespace {

namespace py = pybind11;

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

}  // namespace

void bind_gradients(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GradientHooks, std::shared_ptr<GradientHooks>>(module, "GradientHooks")
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                       double reduced_scale, py::object on_backward_end, py::object on_bucket_full,
                       std::shared_ptr<BlockCache> blocks) {
             return GradientHooks::make(
                 std::move(parameters), std::move(names),
                 {reduced_scale, callback<>(std::move(on_backward_end)),
                  callback<std::size_t>(std::move(on_bucket_full)), std::move(blocks)});
           }),
           py::arg("parameters"), py::arg("names"), py::kw_only(), py::arg("reduced_scale"),
           py::arg("on_backward_end"), py::arg("on_bucket_full"), py::arg("blocks"))
      .def(
          "place",
          [](GradientHooks& hooks, const std::vector<at::Tensor>& buckets,
             const std::vector<std::pair<std::size_t, std::int64_t>>& slots,
             std::vector<bool> early) {
            std::vector<GradientHooks::Slot> placed;
            for (const auto& [bucket, offset] : slots) placed.push_back({bucket, offset});
            hooks.place(buckets, placed, std::move(early));
          },
          py::arg("buckets"), py::arg("slots"), py::arg("early"), Release())
      .def(
          "pending",
          [](GradientHooks& hooks, bool everything) {
            GradientHooks::Pending pending;
            {
              const py::gil_scoped_release release;
              pending = hooks.pending(everything);
            }
            return std::tuple(py::bytes(pending.due), py::bytes(pending.sparse), pending.held_back);
          },
          py::arg("everything"))
      .def("adopt", &GradientHooks::adopt, py::arg("touched"), Release())
      .def("memory", &GradientHooks::memory, py::arg("bucket"), Release())
      .def(
          "contribution",
          [](GradientHooks& hooks, std::size_t index) -> std::optional<at::Tensor> {
            const py::gil_scoped_release release;
            at::Tensor gradient = hooks.contribution(index);
            if (!gradient.defined()) return std::nullopt;
            return gradient;
          },
          py::arg("index"))
      .def("replace", &GradientHooks::replace, py::arg("index"), py::arg("gradient"), Release())
      .def("reduced", &GradientHooks::reduced, py::arg("touched"), Release())
      .def("ready_order", &GradientHooks::ready_order, Release())
      .def("restart", &GradientHooks::restart, py::kw_only(), py::arg("gradients"), Release())
      .def("set_passes_per_step", &GradientHooks::set_passes_per_step, py::arg("passes"), Release())
      .def("set_synchronizing", &GradientHooks::set_synchronizing, py::arg("synchronizing"),
           Release())
      .def("disable", &GradientHooks::disable);

  py::class_<WholePass>(module, "WholePass")
      .def(py::init([](std::shared_ptr<GradientHooks> hooks, GradientHooks::Bitmap everything,
                       std::vector<std::tuple<std::size_t, std::string, std::string>> buckets,
                       int op, double prescale, double postscale) {
        std::vector<WholePass::Bucket> placed;
        for (auto& [index, before, after] : buckets) placed.push_back({index, before, after});
        return std::make_unique<WholePass>(std::move(hooks), std::move(everything),
                                           std::move(placed), op, prescale, postscale);
      }));
}

}  // namespace torch_ring
