#include "bindings/spans.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <string>
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

std::string words_of(const Fingerprint& f) {
  return f.name.empty() ? std::string(name_of(f.collective)) : f.describe();
}

/// The two spans of a request, from its submission to its end.
class Spans {
 public:
  Spans(at::StepCallbacks&& comms, at::StepCallbacks&& named, const Request& request,
        const SpanGroup& group)
      : words_(words_of(request.fingerprint)),
        fields_(fields_of(request, group)),
        named_(std::move(named)),
        comms_(std::move(comms)) {
    named_._setAsync();
    named_.before("torch_ring: " + words_);
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_._setAsync();
    comms_.before(at::kParamCommsCallName);
  }
  ~Spans() { end(); }  // of a request that has failed
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  void end() {
    // The profiler looks for fields when the span ends, too, and takes it for granted that there
    // are any.
    mark_sequence();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PARAM_COMMS_INFO, fields_);
    comms_.end();
    named_.end();
  }

  std::uint64_t* sequence() { return &sequence_; }

 private:
  /// The profiler reads a span's fields when it begins, and the ranks agree later: so the number
  /// gets a span of its own.
  void mark_sequence() {
    if (sequence_ == 0) return;
    at::RecordFunction mark(at::RecordScope::USER_SCOPE);
    if (mark.isActive())
      mark.before("torch_ring: agreed " + std::to_string(sequence_) + ": " + words_);
    sequence_ = 0;  // end() is called again
  }

  const std::string words_;
  const std::shared_ptr<torch::ParamCommsDebugInfo> fields_;
  at::RecordFunction named_;
  at::RecordFunction comms_;
  std::uint64_t sequence_ = 0;  // 0: the ranks have not agreed
};

}  // namespace

void follow_with_span(Request& request, const SpanGroup& group) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  auto named = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!named) return;
  const auto spans =
      std::make_shared<Spans>(std::move(*callbacks), std::move(*named), request, group);
  request.sequence = spans->sequence();
  // The profiler finds its state in the thread that ends the span.
  const std::function<void()> end = at::wrapPropagateTLSState([spans] { spans->end(); });
  request.finish = [end, next = std::move(request.finish)] {
    if (next) next();
    end();
  };
}

}  // namespace torch_ring
