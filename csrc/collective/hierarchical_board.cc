// SPDX-License-Identifier: Apache-2.0
#include "collective/hierarchical_board.h"

#include <algorithm>
#include <cstring>

namespace torch_ring {

namespace {

std::span<std::byte> world_slot(const Slot& slot, std::uint64_t round) {
  return {slot.world_entries(round), Slot::kWorldSlotBytes};
}

int size_of_world(const std::vector<std::vector<int>>& ranks_of_host) {
  std::size_t size = 0;
  for (const auto& ranks : ranks_of_host) size += ranks.size();
  return static_cast<int>(size);
}

}  // namespace

HierarchicalBoard::HierarchicalBoard(Host& host, const std::vector<std::vector<int>>& ranks_of_host,
                                     TcpBoard* leaders)
    : host_(host),
      ranks_of_host_(ranks_of_host),
      size_(size_of_world(ranks_of_host)),
      leaders_(leaders),
      local_(host) {
  for (const auto& ranks : ranks_of_host) order_.insert(order_.end(), ranks.begin(), ranks.end());
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
  if (leaders_ != nullptr) {
    host_.commit(Slot::kWorldEntries, 2 * Slot::kWorldSlotBytes);
  }
}

std::size_t HierarchicalBoard::safe_capacity() const {
  return std::min(capacity(), torch_ring::safe_capacity(Slot::kWorldSlotBytes,
                                                        static_cast<std::size_t>(size_)));
}

void HierarchicalBoard::post(const Post& entry) {
  open_ = true;
  gathered_ = false;
  local_.post(entry);
}

bool HierarchicalBoard::peer_posted() {
  return local_.peer_posted() || (leaders_ != nullptr && leaders_->peer_posted());
}

bool HierarchicalBoard::complete() {
  if (!open_) return true;
  if (!local_.complete()) return false;
  if (leaders_ != nullptr) {
    if (!gathered_) gather();
    if (!leaders_->complete()) return false;
    publish();
  } else if (Host::load(host_.header(0).published) < local_.round_number()) {
    return false;
  }
  read();
  open_ = false;
  return true;
}

/// Posts this host's entries to the other leaders.
void HierarchicalBoard::gather() {
  const Round local = local_.round();
  leaders_->post_runs(Runs(local.runs), local_.least_wait());
  gathered_ = true;
}

/// Hands the runs of all hosts to this host's ranks.
void HierarchicalBoard::publish() {
  write_slot(world_slot(host_.own_slot(), local_.round_number()), leaders_->runs());
  // Relaxed: the store to `published` releases both values to the other ranks. Their loads come
  // before their next post(), which this rank has acquired (local_.complete()) when it stores the
  // values of the next round.
  host_.own().last_of_previous.store(leaders_->least_wait().last(), std::memory_order_relaxed);
  host_.own().most_us.store(leaders_->least_wait().most_us, std::memory_order_relaxed);
  host_.publish(host_.own().published, local_.round_number());
}

/// Reads the runs of all hosts, which are the same on every host, and so are the errors.
void HierarchicalBoard::read() {
  runs_.clear();
  read_slot(world_slot(host_.slot(0), local_.round_number()), static_cast<std::uint32_t>(size_),
            capacity(), runs_);
}

Round HierarchicalBoard::round() {
  const Round local = local_.round();
  entries_.assign(runs_, order_);
  // Relaxed: complete() has acquired `published`, and publish() stores again after the next post().
  return {entries_.runs(), local.locals, local.host_ranks,
          host_.header(0).last_of_previous.load(std::memory_order_relaxed),
          host_.header(0).most_us.load(std::memory_order_relaxed)};
}

std::vector<int> HierarchicalBoard::missing() const {
  std::vector<int> ranks = local_.missing();
  if (leaders_ == nullptr && ranks.empty() && open_) return {host_.rank_of(0)};
  if (leaders_ == nullptr || !gathered_) return ranks;
  for (const int host : leaders_->missing()) {
    const auto& theirs = at(ranks_of_host_, host);
    ranks.insert(ranks.end(), theirs.begin(), theirs.end());
  }
  return ranks;
}

void HierarchicalBoard::wait_until(Clock::time_point deadline, std::chrono::microseconds spin) {
  // While this host's entries are incomplete, frames of other leaders are not a reason to wake up.
  // Once they are complete, this returns: its sleep does not poll the leaders' sockets.
  const bool gathered = gathered_;
  const bool network_matters = leaders_ != nullptr && (!open_ || gathered);
  host_.waiter().wait_until(
      [&] {
        return woken_.exchange(false, std::memory_order_seq_cst) ||
               (open_ ? complete() || gathered_ != gathered : peer_posted());
      },
      deadline, spin, network_matters ? leaders_->fds() : std::span<const pollfd>{});
}

void HierarchicalBoard::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  host_.wake();
}

}  // namespace torch_ring
