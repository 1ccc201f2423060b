#include "collective/shm_board.h"

#include <cstring>

namespace torch_ring {

void ShmBoard::post(std::span<const std::byte> entry) {
  ++round_;
  std::byte* to = host_.own_slot().entry(round_);
  const std::uint64_t bytes = entry.size();
  std::memcpy(to, &bytes, sizeof bytes);
  if (bytes > 0) std::memcpy(to + sizeof bytes, entry.data(), entry.size());
  open_ = true;
  host_.publish(host_.own().posted, round_);
}

bool ShmBoard::peer_posted() {
  for (int peer = 0; peer < host_.size(); ++peer) {
    if (host_.header(peer).posted.load(std::memory_order_acquire) > round_) return true;
  }
  return false;
}

bool ShmBoard::complete() {
  if (open_) open_ = !host_.all_reached(&SegmentHeader::posted, round_);
  return !open_;
}

std::span<const std::byte> ShmBoard::entry(int index) const {
  const std::byte* from = host_.slot(index).entry(round_);
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, from, sizeof bytes);
  if (bytes > capacity_) {
    throw Error(ErrorKind::kInternal, host_.label(index) + " posted an entry of " +
                                          std::to_string(bytes) + " bytes, more than fits");
  }
  return {from + sizeof bytes, static_cast<std::size_t>(bytes)};
}

std::vector<int> ShmBoard::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < host_.size(); ++peer) {
    if (host_.header(peer).posted.load(std::memory_order_acquire) < round_) {
      ranks.push_back(host_.rank_of(peer));
    }
  }
  return ranks;
}

void ShmBoard::wait_until(Clock::time_point deadline, std::chrono::microseconds spin) {
  host_.waiter().wait_until(
      [&] {
        return woken_.exchange(false, std::memory_order_seq_cst) ||
               (open_ ? complete() : peer_posted());
      },
      deadline, spin);
}

void ShmBoard::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  host_.wake();
}

}  // namespace torch_ring
