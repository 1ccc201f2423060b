#include "collective/hierarchical_board.h"

#include <algorithm>
#include <cstring>

namespace torch_ring {

namespace {

constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);

constexpr std::size_t framed_bytes(std::size_t entry_bytes) {
  return kSizeBytes + (entry_bytes + 7) / 8 * 8;
}

int size_of_world(const std::vector<std::vector<int>>& ranks_of_host) {
  std::size_t size = 0;
  for (const auto& ranks : ranks_of_host) size += ranks.size();
  return static_cast<int>(size);
}

}  // namespace

HierarchicalBoard::HierarchicalBoard(Host& host, std::vector<std::vector<int>> ranks_of_host,
                                     TcpBoard* leaders)
    : host_(host),
      ranks_of_host_(std::move(ranks_of_host)),
      leaders_(leaders),
      local_(host, entry_capacity(size_of_world(ranks_of_host_))),
      entries_(static_cast<std::size_t>(size_of_world(ranks_of_host_))) {
  if (leaders_ != nullptr) {
    host_.commit(Slot::kWorldEntries, 2 * Slot::kWorldSlotBytes);
  }
}

std::size_t HierarchicalBoard::entry_capacity(int size) {
  const std::size_t share = Slot::kWorldSlotBytes / static_cast<std::size_t>(size);
  return std::min(Slot::kEntryBytes, (share - kSizeBytes) / 8 * 8);
}

std::size_t HierarchicalBoard::host_capacity(int size, int local_size) {
  return static_cast<std::size_t>(local_size) * framed_bytes(entry_capacity(size));
}

void HierarchicalBoard::post(std::span<const std::byte> entry) {
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
  } else if (host_.header(0).published.load(std::memory_order_acquire) < local_.round()) {
    return false;
  }
  index();
  open_ = false;
  return true;
}

/// Posts this host's entries to the other leaders.
void HierarchicalBoard::gather() {
  gathered_entries_.clear();
  for (int peer = 0; peer < host_.size(); ++peer) {
    const auto entry = local_.entry(peer);
    const std::uint64_t bytes = entry.size();
    const std::size_t at = gathered_entries_.size();
    gathered_entries_.resize(at + framed_bytes(bytes));
    std::memcpy(gathered_entries_.data() + at, &bytes, kSizeBytes);
    if (bytes > 0) std::memcpy(gathered_entries_.data() + at + kSizeBytes, entry.data(), bytes);
  }
  leaders_->post(gathered_entries_);
  gathered_ = true;
}

/// Writes the entries of all hosts to the world slot, where this host's ranks read them.
void HierarchicalBoard::publish() {
  std::byte* to = host_.own_slot().world_entries(local_.round());
  for (std::size_t host = 0; host < ranks_of_host_.size(); ++host) {
    const auto entries = leaders_->entry(static_cast<int>(host));
    std::memcpy(to, entries.data(), entries.size());
    to += entries.size();
  }
  host_.publish(host_.own().published, local_.round());
}

/// Finds every rank's entry in the leader's world slot; checks sizes, as other hosts sent them.
void HierarchicalBoard::index() {
  const std::byte* slot = host_.slot(0).world_entries(local_.round());
  std::size_t offset = 0;
  for (const auto& ranks : ranks_of_host_) {
    for (const int rank : ranks) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, slot + offset, kSizeBytes);
      if (bytes > capacity() || offset + framed_bytes(bytes) > Slot::kWorldSlotBytes) {
        throw Error(ErrorKind::kInternal,
                    "rank " + std::to_string(rank) + " posted an entry that does not fit");
      }
      at(entries_, rank) = {slot + offset + kSizeBytes, bytes};
      offset += framed_bytes(bytes);
    }
  }
}

std::vector<int> HierarchicalBoard::missing() const {
  std::vector<int> ranks = local_.missing();
  if (leaders_ == nullptr || !gathered_) return ranks;
  for (const int host : leaders_->missing()) {
    const auto& theirs = at(ranks_of_host_, host);
    ranks.insert(ranks.end(), theirs.begin(), theirs.end());
  }
  return ranks;
}

void HierarchicalBoard::wait_until(Clock::time_point deadline, std::chrono::microseconds spin) {
  // While this host's entries are incomplete, frames of other leaders are no reason to wake up.
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
