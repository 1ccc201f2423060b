// SPDX-License-Identifier: Apache-2.0
#include "collective/shm_board.h"

#include <cstring>

#include "collective/runs.h"

namespace torch_ring {

namespace {

struct SlotHeader {
  std::uint32_t common_bytes;
  std::uint32_t own_bytes;
  std::uint32_t local_bytes;
  std::uint32_t waited_us;
  std::uint32_t most_us;
  std::uint32_t zero;
};
static_assert(sizeof(SlotHeader) + Slot::kEntryBytes <= Slot::kEntrySlotBytes);

/// Writes a part, and returns its padded end.
std::byte* put_part(std::byte* to, ByteSpan part) {
  if (!part.empty()) std::memcpy(to, part.data(), part.size());
  return to + padded(part.size());
}

}  // namespace

ShmBoard::ShmBoard(Host& host) : host_(host), locals_(static_cast<std::size_t>(host.size())) {
  for (int index = 0; index < host.size(); ++index) ranks_.push_back(host.rank_of(index));
  runs_.reserve(locals_.size());
}

void ShmBoard::post(const Post& entry) {
  if (padded(entry.common.size()) + padded(entry.own.size()) + padded(entry.local.size()) >
      capacity()) {
    throw Error(ErrorKind::kInternal, "an entry that does not fit");
  }
  ++round_;
  std::byte* to = host_.own_slot().entry(round_);
  const SlotHeader header{static_cast<std::uint32_t>(entry.common.size()),
                          static_cast<std::uint32_t>(entry.own.size()),
                          static_cast<std::uint32_t>(entry.local.size()),
                          entry.waited_us,
                          entry.most_us,
                          0};
  std::memcpy(to, &header, sizeof header);
  put_part(put_part(put_part(to + sizeof header, entry.common), entry.own), entry.local);
  open_ = true;
  host_.publish(host_.own().posted, round_);
}

bool ShmBoard::peer_posted() {
  for (int peer = 0; peer < host_.size(); ++peer) {
    if (Host::load(host_.header(peer).posted) > round_) return true;
  }
  return false;
}

bool ShmBoard::complete() {
  if (!open_) return true;
  open_ = !host_.all_reached(&SegmentHeader::posted, round_);
  return !open_;
}

Round ShmBoard::round() {
  runs_.clear();
  least_wait_ = {};
  for (int index = 0; index < host_.size(); ++index) {
    const auto [common, own, local, waited_us, most_us] = entry(index);
    least_wait_.include({waited_us, static_cast<std::uint32_t>(at(ranks_, index)), most_us});
    at(locals_, index) = local;
    // Own parts are not compared: they are usually empty, or differ.
    if (own.empty() && !runs_.empty() && runs_.back().own.empty() &&
        common.size() == runs_.back().common.size() &&
        std::memcmp(common.data(), runs_.back().common.data(), common.size()) == 0) {
      ++runs_.back().count;
    } else {
      runs_.push_back({index, 1, common, own});
    }
  }
  return {runs_, locals_, ranks_, least_wait_.last(), least_wait_.most_us};
}

/// The entry of one rank of this host. Checks the sizes in its slot.
Post ShmBoard::entry(int index) const {
  const std::byte* from = host_.slot(index).entry(round_);
  SlotHeader header;
  std::memcpy(&header, from, sizeof header);
  from += sizeof header;
  const std::size_t common = padded(header.common_bytes);
  const std::size_t own = padded(header.own_bytes);
  const std::size_t bytes = common + own + padded(header.local_bytes);
  if (bytes > capacity()) {
    throw Error(ErrorKind::kInternal, host_.label(index) + " posted an entry of " +
                                          std::to_string(bytes) + " bytes, more than fits");
  }
  return {{from, header.common_bytes},
          {from + common, header.own_bytes},
          {from + common + own, header.local_bytes},
          header.waited_us,
          header.most_us};
}

std::vector<int> ShmBoard::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < host_.size(); ++peer) {
    if (Host::load(host_.header(peer).posted) < round_) {
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
