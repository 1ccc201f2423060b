#include "bindings/spans.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <utility>
#include <vector>

#include "bindings/dtypes.h"

namespace torch_ring {

namespace {

/// What torch calls a collective in `record_param_comms`.
const char* torchs_name(Collective collective) {
  switch (collective) {
    case Collective::kAllreduce:
      return "allreduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllgather:
      return "all_gather";
    case Collective::kAlltoall:
      return "all_to_all";
    case Collective::kReducescatter:
      return "reduce_scatter";
    case Collective::kReduce:
      return "reduce";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kBarrier:
    case Collective::kFence:
    case Collective::kJoin:
      break;
  }
  return "barrier";
}

std::shared_ptr<torch::ParamCommsDebugInfo> fields_of(const Request& request,
                                                      const SpanGroup& group) {
  const Fingerprint& f = request.fingerprint;
  const bool moves = !is_barrier(f.collective) && f.collective != Collective::kJoin;
  const auto given =
      moves ? static_cast<std::int64_t>(request.input_bytes() / size_of(f.dtype)) : 0;
  return std::make_shared<torch::ParamCommsDebugInfo>(
      std::make_tuple(std::to_string(group.set), "torch_ring, " + group.transport), group.rank,
      torchs_name(f.collective), given, given, scalar_type_of(f.dtype), std::vector<std::int64_t>{},
      std::vector<std::int64_t>{}, group.set == 0 ? 0 : -1, group.set == 0 ? 1 : -1, group.size);
}

/// The two spans of a request, from its submission to its end.
class Spans {
 public:
  Spans(at::StepCallbacks&& comms, at::StepCallbacks&& named, const Request& request,
        const SpanGroup& group)
      : fields_(fields_of(request, group)), named_(std::move(named)), comms_(std::move(comms)) {
    named_._setAsync();
    named_.before("torch_ring: " + (request.fingerprint.name.empty()
                                        ? std::string(name_of(request.fingerprint.collective))
                                        : request.fingerprint.describe()));
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_._setAsync();
    comms_.before(at::kParamCommsCallName);
  }
  ~Spans() { end(); }  // of a request that has failed
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  void end() {
    // The profiler reads the fields when the span ends, and takes it for granted that there are
    // any.
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_.end();
    named_.end();
  }

 private:
  const std::shared_ptr<torch::ParamCommsDebugInfo> fields_;
  at::RecordFunction named_;
  at::RecordFunction comms_;
};

}  // namespace

void follow_with_span(Request& request, const SpanGroup& group) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  auto named = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!named) return;
  const auto spans =
      std::make_shared<Spans>(std::move(*callbacks), std::move(*named), request, group);
  // The profiler finds its state in the thread that ends the span.
  const std::function<void()> end = at::wrapPropagateTLSState([spans] { spans->end(); });
  request.finish = [end, next = std::move(request.finish)] {
    if (next) next();
    end();
  };
}

}  // namespace torch_ring
