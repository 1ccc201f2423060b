// The engine's rounds: announce what is new, run what is agreed. By the progress thread, without
// the lock.
#include <list>

#include "engine/announce.h"
#include "engine/engine.h"

namespace torch_ring {

void Engine::announce_outbox(bool blocked) {
  entry_.clear(blocked);
  const bool alone = outbox_.size() == 1;
  while (!outbox_.empty()) {
    Work& work = *outbox_.front();
    const Request& request = work.request();
    // From here on no round is unanimous: those that follow say that the others get on.
    if (request.fingerprint.collective == Collective::kJoin) last_decision_ = Clock::now();
    const Announcement announcement = announce(request, alone, *communicator_, fingerprint_);
    const std::size_t needed = EntryWriter::bytes_needed(announcement);
    if (entry_.bytes().size() + needed > board_.capacity()) {
      if (entry_.count() > 0) break;  // the rest goes into the next round
      throw Error(ErrorKind::kInternal, request.fingerprint.describe() + " does not fit an entry");
    }
    entry_.append(announcement);
    pending_.emplace(work.key_, std::move(outbox_.front()));
    outbox_.pop_front();
  }
  board_.post(entry_.bytes());
  round_open_ = true;
}

void Engine::finish_round() {
  round_open_ = false;
  entries_.clear();
  for (int rank = 0; rank < communicator_->size(); ++rank) entries_.push_back(board_.entry(rank));
  if (run_unanimous()) return;
  const std::vector<Decision> decisions = agreement_.round(entries_);

  struct {
    std::vector<Job> jobs;
    std::vector<std::shared_ptr<Work>> works;  // null for a stand-in
  } here, on_device;
  std::list<StandIn> stand_ins;
  if (!decisions.empty()) last_decision_ = Clock::now();
  for (const Decision& decision : decisions) {
    const auto mine = pending_.find(decision.key);
    if (decision.resets_numbering) reset_numbering();
    if (mine == pending_.end() && !decision.for_joined) continue;  // and a mismatch
    const Fingerprint& fingerprint =
        mine == pending_.end() ? *decision.for_joined : mine->second->request().fingerprint;
    std::optional<Error> error = decision.mismatch;
    if (!error && !fingerprint.on_host()) {
      error = device_.prepare(fingerprint.device, *communicator_, *abort_);
    }
    auto& [jobs, works] = fingerprint.on_host() ? here : on_device;
    if (error) {
      if (mine == pending_.end()) continue;
      complete(*mine->second, *error);
      pending_.erase(mine);
    } else if (mine != pending_.end()) {
      jobs.push_back({&mine->second->request(), &decision});
      works.push_back(mine->second);
    } else {
      Buffers& buffers = fingerprint.on_host() ? host_buffers_ : device_.buffers();
      jobs.push_back({&stand_ins.emplace_back(fingerprint, buffers).request, &decision});
      works.push_back(nullptr);
    }
  }
  const auto run = [&](auto& executor, auto& batch) {
    executor.run(batch.jobs, [&](std::size_t i) {
      if (!batch.works[i]) return;
      const std::string key = batch.works[i]->key_;
      complete(*batch.works[i], std::nullopt);
      pending_.erase(key);
    });
  };
  run(executor_, here);
  if (on_device.jobs.empty()) return;
  {
    const Lock lock(mutex_);
    device_busy_ = true;  // before a work is done: close() waits for what runs
  }
  run(device_, on_device);
}

/// The usual round: nothing was pending, and all ranks have announced the same one request. Returns
/// whether this is one.
bool Engine::run_unanimous() {
  if (pending_.size() != 1 || !agreement_.empty()) return false;
  Work& work = *pending_.begin()->second;
  const Fingerprint& fingerprint = work.request().fingerprint;
  if (!fingerprint.on_host()) return false;
  const auto decision = Agreement::unanimous(fingerprint, entries_);
  if (!decision) return false;
  if (decision->resets_numbering) reset_numbering();
  const Job job{&work.request(), &*decision};
  executor_.run({&job, 1}, [&](std::size_t) { complete(work, std::nullopt); });
  pending_.clear();
  return true;
}

/// All ranks wait for the same thing: they begin to count anew.
void Engine::reset_numbering() {
  const Lock lock(mutex_);
  names_.renew();
}

/// The error as the work's: who, what, and why.
Error Engine::describe(const Work& work, const Error& error) const {
  return {error.kind(), name_ + ": " + work.request().fingerprint.describe() + ": " + error.what()};
}

void Engine::complete(Work& work, std::optional<Error> error) {
  if (!error && work.request_.finish) work.request_.finish();
  // What they hold belongs to a device's stream, if any: it is let go of here.
  work.request_.begin = work.request_.finish = nullptr;
  const Lock lock(mutex_);
  in_flight_.erase(work.key_);
  if (error) error = describe(work, *error);
  work.complete(std::move(error));
  if (waiters_ > 0) changed_.notify_all();
}

}  // namespace torch_ring
