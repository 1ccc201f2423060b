#include "bindings/finalize_dense.h"

#include <numeric>
#include <utility>

#include "bindings/requests.h"
#include "engine/backward_messages.h"

namespace torch_ring {

namespace {

/// Gathers the ranks' bytes, in the order of ranks. Ranks that have joined have none.
std::string gather(Engine& engine, std::string name, const std::string& bytes,
                   const Engine::Interrupt& interrupt) {
  struct Buffers {
    std::string mine;
    std::string all;
  };
  // Shared with the request, which stays in flight if the wait is interrupted.
  const auto buffers = std::make_shared<Buffers>(Buffers{bytes, {}});
  Request request;
  request.fingerprint.collective = Collective::kAllgather;
  request.fingerprint.dtype = DType::kUInt8;
  request.fingerprint.name = std::move(name);
  request.fingerprint.joinable = true;
  request.rows = {static_cast<std::int64_t>(bytes.size())};
  request.input = buffers->mine.data();
  request.allocate = [buffers](std::span<const std::int64_t> rows) {
    buffers->all.resize(
        static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0})));
    return static_cast<void*>(buffers->all.data());
  };
  engine.submit_and_wait(std::move(request), interrupt);
  return std::move(buffers->all);
}

}  // namespace

DenseFinalizer::DenseFinalizer(std::shared_ptr<GradientHooks> hooks, std::size_t optimizer,
                               GradientHooks::Bitmap everything, std::vector<std::size_t> buckets,
                               int op, double prescale, double postscale)
    : hooks_(std::move(hooks)),
      optimizer_(optimizer),
      everything_(std::move(everything)),
      buckets_(std::move(buckets)),
      op_(op),
      prescale_(prescale),
      postscale_(postscale) {}

std::optional<std::string> DenseFinalizer::run(Engine& engine, int size, const std::string& report,
                                               std::uint64_t number,
                                               const Engine::Interrupt& interrupt) const {
  const GradientHooks::Pending pending = hooks_->pending(false);
  const bool any_sparse = pending.sparse.find_first_not_of('\0') != std::string::npos;
  if (pending.due != everything_ || any_sparse || pending.accumulating) return std::nullopt;
  std::string gathered = gather(engine, backward_name(number), report, interrupt);
  if (!all_sent(gathered, report)) return gathered;

  hooks_->move_into_buckets(everything_);
  std::vector<Request> requests;
  for (const std::size_t bucket : buckets_) {
    const at::Tensor memory = hooks_->memory(bucket);
    requests.push_back(allreduce_request(memory, memory, bucket_name(optimizer_, number, bucket, 0),
                                         op_, prescale_, postscale_, size));
  }
  for (const auto& work : engine.submit(std::move(requests), Engine::Mode::kBlocking)) {
    engine.wait(*work, interrupt);
  }
  hooks_->mark_reduced(everything_);
  return std::string();
}

}  // namespace torch_ring
