// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/py_engine.h"
#include "engine/request.h"
#include "gradients/decide.h"
#include "gradients/end_pass.h"
#include "gradients/gradient_hooks.h"
#include "gradients/promised_launches.h"
#include "gradients/report.h"
#include "gradients/run_ahead.h"

namespace pybind11::detail {

/// A bitmap is an int in Python.
template <>
struct type_caster<torch_ring::Bitmap> {
  PYBIND11_TYPE_CASTER(torch_ring::Bitmap, const_name("int"));

  bool load(handle source, bool /*convert*/) {
    if (!PyLong_Check(source.ptr())) return false;
    const auto bits = source.attr("bit_length")().cast<std::size_t>();
    value =
        torch_ring::Bitmap(source.attr("to_bytes")((bits + 7) / 8, "little").cast<std::string>());
    return true;
  }

  static handle cast(const torch_ring::Bitmap& bitmap, return_value_policy, handle) {
    const handle type(reinterpret_cast<PyObject*>(&PyLong_Type));
    return type.attr("from_bytes")(bytes(bitmap.bytes()), "little").release();
  }
};

}  // namespace pybind11::detail

namespace torch_ring {
namespace {

namespace py = pybind11;

/// A Python function for autograd's threads: autograd rethrows its exception from backward().
template <class Result, class... Args>
std::function<Result(Args...)> callback(py::object function) {
  const std::shared_ptr<py::object> callable(
      new py::object(std::move(function)), [](py::object* it) {
        const py::gil_scoped_acquire gil;  // an autograd thread may drop the last reference
        delete it;
      });
  return [callable](Args... args) -> Result {
    const py::gil_scoped_acquire gil;
    try {
      return (*callable)(args...).template cast<Result>();
    } catch (py::error_already_set& error) {
      error.restore();
      python_error for_autograd;
      for_autograd.persist();
      throw for_autograd;
    }
  };
}

Launched launch(const PyEngine& engine, const at::Tensor& tensor, int op, double prescale,
                double postscale) {
  DeviceChoice::of_process()->use(tensor.device());
  auto launched = [&] {
    const BlockingCall no_gil;
    return launch_allreduce(engine.running(), engine.size(), tensor, op, prescale, postscale,
                            kCheckSignals);
  }();
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return launched;
}

void begin_series(PromisedLaunches& series,
                  const std::vector<std::tuple<bool, std::int64_t, bool>>& promised,
                  const at::Tensor& like, bool in_backward) {
  std::vector<PromisedLaunches::Item> items;
  for (const auto& [gathers, count, is_double] : promised) {
    items.push_back({gathers, count, is_double});
  }
  const BlockingCall no_gil;
  series.begin(std::move(items), like.device(), in_backward);
}

std::shared_ptr<RunAhead> make_run_ahead(PyEngine& engine) {
  auto run_ahead = std::make_shared<RunAhead>(engine.running());
  engine.stand_in_by(standing_in(run_ahead));
  return run_ahead;
}

using PlainReductions = std::vector<std::shared_ptr<PlainReduction>>;

void run(PassEnd& end, const PyEngine& engine, PassAgreement& agreement, const PassReport& report,
         const std::map<std::size_t, std::size_t>& parameters, const PlainReductions& plain) {
  const std::shared_ptr<Engine> running = engine.running();
  const BlockingCall no_gil;
  end.run(*running, engine.size(), agreement, report, parameters, plain, kCheckSignals);
}

bool run_plain(PassEnd& end, const PyEngine& engine, PassAgreement& agreement, int rank,
               std::uint64_t steps, const PlainReductions& plain) {
  const std::shared_ptr<Engine> running = engine.running();
  const BlockingCall no_gil;
  return end.run_plain(*running, engine.size(), rank, agreement, steps, plain, kCheckSignals);
}

/// The reports and the decision, which are values.
void bind_reports(py::module_& module) {
  py::enum_<Worst>(module, "Worst")
      .value("finite", Worst::kFinite)
      .value("large", Worst::kLarge)
      .value("infinite", Worst::kInfinite)
      .value("nan", Worst::kNaN);
  py::class_<NotFinite>(module, "NotFinite")
      .def(py::init<std::size_t, int, Worst, bool>(), py::arg("parameter"), py::arg("rank"),
           py::arg("worst"), py::arg("carries"))
      .def_readonly("parameter", &NotFinite::parameter)
      .def_readonly("rank", &NotFinite::rank)
      .def_readonly("worst", &NotFinite::worst)
      .def_readonly("carries", &NotFinite::carries)
      .def(py::self == py::self);
  py::class_<GradientReport>(module, "GradientReport")
      .def(py::init([](std::size_t optimizer, Bitmap due, Bitmap sparse, bool accumulating,
                       bool incomplete, bool stepping, bool late, Bitmap carried, Bitmap unsure,
                       std::vector<std::uint32_t> order, const py::bytes& digest,
                       std::vector<NotFinite> not_finite) {
             return GradientReport{optimizer,
                                   std::move(due),
                                   std::move(sparse),
                                   accumulating,
                                   incomplete,
                                   stepping,
                                   late,
                                   std::move(carried),
                                   std::move(unsure),
                                   std::move(order),
                                   digest,
                                   std::move(not_finite)};
           }),
           py::arg("optimizer"), py::arg("due") = Bitmap(), py::kw_only(),
           py::arg("sparse") = Bitmap(), py::arg("accumulating") = false,
           py::arg("incomplete") = false, py::arg("stepping") = false, py::arg("late") = false,
           py::arg("carried") = Bitmap(), py::arg("unsure") = Bitmap(),
           py::arg("order") = std::vector<std::uint32_t>(), py::arg("digest") = py::bytes(),
           py::arg("not_finite") = std::vector<NotFinite>())
      .def_readonly("optimizer", &GradientReport::optimizer)
      .def_readonly("due", &GradientReport::due)
      .def_property_readonly("is_due",
                             [](const GradientReport& report) { return report.due.any(); })
      .def_readonly("sparse", &GradientReport::sparse)
      .def_readonly("carried", &GradientReport::carried)
      .def_readonly("unsure", &GradientReport::unsure)
      .def_readonly("accumulating", &GradientReport::accumulating)
      .def_readonly("stepping", &GradientReport::stepping)
      .def_property_readonly("digest",
                             [](const GradientReport& report) { return py::bytes(report.digest); })
      .def(
          "with_digest",
          [](GradientReport report, const py::bytes& digest) {
            report.digest = digest;
            return report;
          },
          py::arg("digest"))
      .def(py::self == py::self);
  py::class_<PassReport, std::shared_ptr<PassReport>>(module, "PassReport")
      .def(py::init([](std::uint64_t steps, std::vector<GradientReport> gradients, bool gave_up,
                       std::uint32_t plan) {
             return PassReport{steps, std::move(gradients), gave_up, plan};
           }),
           py::arg("steps"), py::arg("gradients") = std::vector<GradientReport>(), py::kw_only(),
           py::arg("gave_up") = false, py::arg("plan") = 0)
      .def_readonly("steps", &PassReport::steps)
      .def_readonly("gradients", &PassReport::gradients)
      .def_readonly("gave_up", &PassReport::gave_up)
      .def_readonly("plan", &PassReport::plan)
      .def_property_readonly("is_of_step", &PassReport::is_of_step)
      .def_property_readonly("due", &PassReport::due)
      .def("encode", [](const PassReport& report) { return py::bytes(report.encode()); })
      .def_static(
          "decode_all",
          [](const py::bytes& encoded) {
            return PassReport::decode_all(static_cast<std::string_view>(encoded));
          },
          py::arg("encoded"))
      .def(py::self == py::self);
  py::class_<PassDecision::Reduction>(module, "Reduction")
      .def_readonly("optimizer", &PassDecision::Reduction::optimizer)
      .def_readonly("touched", &PassDecision::Reduction::touched)
      .def_readonly("sparse", &PassDecision::Reduction::sparse)
      .def_readonly("carried", &PassDecision::Reduction::carried)
      .def_readonly("unlike", &PassDecision::Reduction::unlike)
      .def_readonly("order", &PassDecision::Reduction::order)
      .def_readonly("not_finite", &PassDecision::Reduction::not_finite);
  py::class_<PassDecision>(module, "PassDecision")
      .def_readonly("given_up", &PassDecision::given_up)
      .def_readonly("out_of_step", &PassDecision::out_of_step)
      .def_readonly("reductions", &PassDecision::reductions)
      .def_readonly("is_of_step", &PassDecision::is_of_step)
      .def_readonly("is_whole", &PassDecision::is_whole)
      .def_readonly("has_digests", &PassDecision::has_digests)
      .def_readonly("has_another_round", &PassDecision::has_another_round)
      .def_readonly("mentioned", &PassDecision::mentioned)
      .def_readonly("open", &PassDecision::open)
      .def_readonly("incomplete", &PassDecision::incomplete);
  module.def("decide", &decide, py::arg("reports"), py::arg("size"), py::arg("parameters"));
}

}  // namespace

void bind_gradients(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PlannedBucket>(module, "PlannedBucket")
      .def(py::init([](const std::shared_ptr<GradientHooks>& hooks, std::size_t bucket,
                       std::vector<std::pair<std::int64_t, std::int64_t>> runs, at::Tensor memory,
                       bool cast, int op, double prescale, double postscale) {
             return PlannedBucket{hooks, bucket, std::move(runs), std::move(memory),
                                  cast,  op,     prescale,        postscale};
           }),
           py::arg("hooks"), py::arg("bucket"), py::arg("runs"), py::arg("memory"), py::arg("cast"),
           py::arg("op"), py::arg("prescale"), py::arg("postscale"));
  py::class_<Launched>(module, "Launch")
      .def("done", &Launched::done)
      .def("wait", [](const Launched& launched) { return launched.wait(); });
  module.def("launch_allreduce", &launch, py::arg("engine"), py::arg("tensor"), py::arg("op"),
             py::arg("prescale"), py::arg("postscale"));
  py::class_<PromisedLaunches, std::shared_ptr<PromisedLaunches>>(module, "PromisedLaunches")
      .def(py::init([](const PyEngine& engine) {
             return std::make_shared<PromisedLaunches>(engine.running(), engine.size());
           }),
           py::arg("engine"))
      .def("begin", &begin_series, py::arg("promised"), py::arg("like"), py::arg("in_backward"))
      .def("is_interrupted", &PromisedLaunches::is_interrupted, Release())
      .def("launch", &PromisedLaunches::launch, py::arg("tensor"), py::arg("gathers"), Release())
      .def("end", &PromisedLaunches::end, Release())
      .def("place", &PromisedLaunches::place, Release());
  py::class_<RunAhead, std::shared_ptr<RunAhead>>(module, "RunAhead")
      .def(py::init(&make_run_ahead), py::arg("engine"))
      .def("set_plan", &RunAhead::set_plan, py::arg("buckets"), Release())
      .def("open", &RunAhead::open, Release())
      .def("has_launched", &RunAhead::has_launched, Release())
      .def("launch_rest", &RunAhead::launch_rest, Release())
      .def("wait", &RunAhead::wait, Release());
  bind_reports(module);
  py::enum_<GradientHooks::Due>(module, "Due")
      .value("now", GradientHooks::Due::kNow)
      .value("begun", GradientHooks::Due::kBegun)
      .value("everything", GradientHooks::Due::kEverything);
  using Pending = GradientHooks::Pending;
  py::class_<Pending>(module, "Pending")
      .def_readonly("due", &Pending::due)
      .def_readonly("sparse", &Pending::sparse)
      .def_readonly("carried", &Pending::carried)
      .def_readonly("unsure", &Pending::unsure)
      .def_readonly("accumulating", &Pending::accumulating)
      .def_readonly("complete", &Pending::complete)
      .def_readonly("late", &Pending::late)
      .def_readonly("unready", &Pending::unready)
      .def_property_readonly("any", &Pending::any);
  py::class_<GradientHooks, std::shared_ptr<GradientHooks>>(module, "GradientHooks")
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                       py::object on_backward_end, py::object on_bucket_full, py::object new_memory,
                       py::object fail, std::shared_ptr<BlockPool> blocks,
                       std::shared_ptr<PassAgreement> agreement,
                       const std::shared_ptr<RunAhead>& run_ahead, bool sums,
                       std::optional<double> largest) {
             return GradientHooks::make(
                 std::move(parameters), std::move(names),
                 {callback<void>(std::move(on_backward_end)),
                  callback<void, std::size_t>(std::move(on_bucket_full)),
                  [run_ahead](const GradientHooks& hooks, std::size_t bucket) {
                    run_ahead->bucket_full(hooks, bucket);
                  },
                  [run_ahead](const GradientHooks& hooks, std::size_t bucket) {
                    if (run_ahead) run_ahead->wait_for(hooks, bucket);
                  },
                  callback<at::Tensor, std::size_t>(std::move(new_memory)),
                  callback<void, const std::string&>(std::move(fail)), std::move(blocks),
                  std::move(agreement), sums, largest});
           }),
           py::arg("parameters"), py::arg("names"), py::kw_only(), py::arg("on_backward_end"),
           py::arg("on_bucket_full"), py::arg("new_memory"), py::arg("fail"), py::arg("blocks"),
           py::arg("agreement"), py::arg("run_ahead"), py::arg("sums"), py::arg("largest"))
      .def(
          "set_buckets",
          [](GradientHooks& hooks, const std::vector<at::Tensor>& buckets,
             const std::vector<std::pair<std::size_t, std::int64_t>>& slots,
             std::vector<bool> early) {
            std::vector<GradientHooks::Slot> parts;
            for (const auto& [bucket, offset] : slots) parts.push_back({bucket, offset});
            hooks.set_buckets(buckets, parts, std::move(early));
          },
          py::arg("buckets"), py::arg("slots"), py::arg("early"), Release())
      .def("pending", &GradientHooks::pending, py::arg("which"), py::arg("stepping") = nullptr,
           Release())
      .def("report", &GradientHooks::report, py::arg("pending"), py::arg("optimizer"),
           py::kw_only(), py::arg("is_stepping"), py::arg("orders"), py::arg("rank"), Release())
      .def_static("worst_numbers", &FiniteCheck::worst_numbers, py::arg("gradients"), Release())
      .def("set_by_hand", &GradientHooks::set_by_hand, Release())
      .def("leave", &GradientHooks::leave)
      .def(
          "set_elsewhere",
          [](GradientHooks& hooks,
             const std::map<std::size_t, std::pair<std::shared_ptr<GradientHooks>, std::size_t>>&
                 slots) {
            std::map<std::size_t, GradientHooks::Elsewhere> elsewhere;
            for (const auto& [index, there] : slots) {
              elsewhere.emplace(index, GradientHooks::Elsewhere{there.first, there.second});
            }
            const py::gil_scoped_release release;
            hooks.set_elsewhere(std::move(elsewhere));
          },
          py::arg("slots"))
      .def("refuse_others_pass", &GradientHooks::refuse_others_pass, Release())
      .def("parameters_moved", &GradientHooks::parameters_moved, Release())
      .def("require_unchanged", &GradientHooks::require_unchanged, py::arg("touched"), Release())
      .def("carry", &GradientHooks::carry, py::arg("carried"), Release())
      .def("drop_averaged", &GradientHooks::drop_averaged, py::arg("dropped"), Release())
      .def("carried_part", &GradientHooks::carried_part, py::arg("index"), Release())
      .def(
          "sparse_carried",
          [](GradientHooks& hooks, std::size_t index) -> std::optional<at::Tensor> {
            const py::gil_scoped_release release;
            at::Tensor part = hooks.sparse_carried(index);
            if (!part.defined()) return std::nullopt;
            return part;
          },
          py::arg("index"))
      .def("set_sparse_carried", &GradientHooks::set_sparse_carried, py::arg("index"),
           py::arg("part"), Release())
      .def("move_into_buckets", &GradientHooks::move_into_buckets, py::arg("touched"),
           py::arg("scale"), Release())
      .def("memory", &GradientHooks::memory, py::arg("bucket"), Release())
      .def("bucket_view", &GradientHooks::bucket_view, py::arg("index"), Release())
      .def(
          "local_gradient",
          [](GradientHooks& hooks, std::size_t index, double scale) -> std::optional<at::Tensor> {
            const py::gil_scoped_release release;
            at::Tensor gradient = hooks.local_gradient(index, scale);
            if (!gradient.defined()) return std::nullopt;
            return gradient;
          },
          py::arg("index"), py::arg("scale"))
      .def("set_sparse_result", &GradientHooks::set_sparse_result, py::arg("index"),
           py::arg("gradient"), Release())
      .def("mark_reduced", &GradientHooks::mark_reduced, py::arg("touched"), Release())
      .def("expect", &GradientHooks::expect, py::arg("planned"), Release())
      .def("fill", &GradientHooks::fill, py::arg("planned"), py::arg("due"), py::arg("scale"),
           Release())
      .def("restore", &GradientHooks::restore, py::arg("nowhere"), Release())
      .def("take_up_late", &GradientHooks::take_up_late, Release())
      .def("compiled_together", &GradientHooks::compiled_together, Release())
      .def("reset", &GradientHooks::reset, py::kw_only(), py::arg("gradients"), Release())
      .def("doubt_averages", &GradientHooks::doubt_averages, Release())
      .def("has_failed", &GradientHooks::has_failed, Release())
      .def("restart_passes", &GradientHooks::restart_passes, Release())
      .def("set_passes_per_step", &GradientHooks::set_passes_per_step, py::arg("passes"), Release())
      .def("set_synchronizing", &GradientHooks::set_synchronizing, py::arg("synchronizing"),
           Release())
      .def("disable", &GradientHooks::disable);

  py::class_<PassAgreement, std::shared_ptr<PassAgreement>>(module, "PassAgreement")
      .def(py::init())
      .def_property_readonly("number", &PassAgreement::number)
      .def_property_readonly("is_open", &PassAgreement::is_open)
      .def_property_readonly("open_report", &PassAgreement::open_report)
      .def_property_readonly("is_reducing", &PassAgreement::is_reducing)
      .def_property_readonly("failure", &PassAgreement::failure)
      .def_property_readonly("has_sent_in_vain", &PassAgreement::has_sent_in_vain)
      .def("begin_reduction", &PassAgreement::begin_reduction)
      .def("finish", &PassAgreement::finish)
      .def("restart", &PassAgreement::restart, py::arg("number"))
      .def("begin_ending", &PassAgreement::begin_ending, py::kw_only(), py::arg("of_step"))
      .def("stop_ending", &PassAgreement::stop_ending);

  py::class_<PlainReduction, std::shared_ptr<PlainReduction>>(module, "PlainReduction")
      .def(py::init<std::shared_ptr<GradientHooks>, std::size_t, std::vector<Bitmap>, int, double,
                    double, double>(),
           py::arg("hooks"), py::arg("optimizer"), py::arg("buckets"), py::arg("op"),
           py::arg("prescale"), py::arg("postscale"), py::arg("rescale"));
  py::class_<PassEnd>(module, "PassEnd")
      .def(py::init())
      .def("run", &run, py::arg("engine"), py::arg("agreement"), py::arg("report"),
           py::arg("parameters"), py::arg("plain"))
      .def("run_plain", &run_plain, py::arg("engine"), py::arg("agreement"), py::arg("rank"),
           py::arg("steps"), py::arg("plain"))
      .def_property_readonly("reports", &PassEnd::reports)
      .def_property_readonly("own", &PassEnd::own)
      .def_property_readonly("decision", &PassEnd::decision)
      .def_property_readonly("is_reduced", &PassEnd::is_reduced)
      .def_property_readonly("is_complete", &PassEnd::is_complete)
      .def("raise_interrupt", &PassEnd::rethrow_interrupt);

  module.def("backward_name", &backward_name);
  module.def("bucket_name", &bucket_name);
  module.def("in_words", &in_words);
  module.def("all_sent", &all_sent);
}

}  // namespace torch_ring
