// SPDX-License-Identifier: Apache-2.0
#include "collective/runs.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

namespace {

bool equal(ByteSpan a, ByteSpan b) {
  return a.size() == b.size() &&
         (a.data() == b.data() || a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

struct GroupHeader {
  std::uint32_t ranks;
  std::uint32_t common_bytes;
  std::uint64_t own_bytes;  // of all own parts with their headers; 0: no rank has one
};

struct OwnHeader {
  std::uint32_t ranks;
  std::uint32_t bytes;
};

/// Consecutive items with equal common parts.
struct Group {
  std::span<const EqualEntries> items;
  GroupHeader header;
};

/// The group at the beginning of `items`.
Group first_group(std::span<const EqualEntries> items) {
  const ByteSpan common = items.front().common;
  GroupHeader header{0, static_cast<std::uint32_t>(common.size()), 0};
  bool any_own = false;
  std::size_t count = 0;
  while (count < items.size() && equal(items[count].common, common)) {
    const EqualEntries& item = items[count++];
    header.ranks += item.count;
    header.own_bytes += sizeof(OwnHeader) + padded(item.own.size());
    any_own = any_own || !item.own.empty();
  }
  if (!any_own) header.own_bytes = 0;
  return {items.first(count), header};
}

template <class Fn>
void for_each_group(const Runs& runs, Fn&& fn) {
  for (auto items = runs.items(); !items.empty();) {
    const Group group = first_group(items);
    fn(group);
    items = items.subspan(group.items.size());
  }
}

template <class T>
std::byte* put(std::byte* to, const T& value) {
  std::memcpy(to, &value, sizeof value);
  return to + sizeof value;
}

std::byte* put(std::byte* to, ByteSpan bytes) {
  if (bytes.empty()) return to;
  std::memset(to + padded(bytes.size()) - 8, 0, 8);  // the padding
  std::memcpy(to, bytes.data(), bytes.size());
  return to + padded(bytes.size());
}

[[noreturn]] void throw_broken(const char* what) { throw Error(ErrorKind::kInternal, what); }

/// Reads untrusted bytes from the front.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }

  /// Takes the next `bytes` bytes and their padding.
  ByteSpan take(std::uint64_t bytes) {
    if (bytes > left_.size() || padded(bytes) > left_.size()) {
      throw_broken("an entry that does not fit");
    }
    const ByteSpan taken = left_.first(bytes);
    left_ = left_.subspan(padded(bytes));
    return taken;
  }

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

 private:
  ByteSpan left_;
};

}  // namespace

void Runs::append(const EqualEntries& entries) {
  ranks_ += entries.count;
  if (!items_.empty() && equal(items_.back().common, entries.common) &&
      equal(items_.back().own, entries.own)) {
    items_.back().count += entries.count;
  } else {
    items_.push_back(entries);
  }
}

void Runs::append(const Runs& runs) {
  for (const EqualEntries& entries : runs.items_) append(entries);
}

Runs Runs::part(std::uint32_t first, std::uint32_t count) const {
  Runs part;
  std::uint32_t begin = 0;
  for (const EqualEntries& item : items_) {
    const std::uint32_t from = std::max(begin, first);
    const std::uint32_t to = std::min(begin + item.count, first + count);
    if (from < to) part.append({to - from, item.common, item.own});
    begin += item.count;
  }
  return part;
}

std::size_t encoded_bytes(const Runs& runs) {
  std::size_t bytes = 0;
  for_each_group(runs, [&](const Group& group) {
    bytes += sizeof group.header + padded(group.header.common_bytes) + group.header.own_bytes;
  });
  return bytes;
}

std::byte* encode(const Runs& runs, std::byte* to) {
  for_each_group(runs, [&](const Group& group) {
    to = put(to, group.header);
    to = put(to, group.items.front().common);
    if (group.header.own_bytes == 0) return;
    for (const EqualEntries& item : group.items) {
      to = put(to, OwnHeader{item.count, static_cast<std::uint32_t>(item.own.size())});
      to = put(to, item.own);
    }
  });
  return to;
}

void decode(ByteSpan bytes, std::uint32_t ranks, std::size_t capacity, Runs& to) {
  Reader reader(bytes);
  const auto take_ranks = [](std::uint32_t& left, std::uint32_t count) {
    if (count == 0 || count > left) throw_broken("entries of other ranks than its own");
    left -= count;
  };
  const auto check_size = [&](std::size_t common, std::size_t own) {
    if (padded(common) + padded(own) > capacity) throw_broken("an entry that does not fit");
  };
  while (!reader.empty()) {
    const auto group = reader.take<GroupHeader>();
    take_ranks(ranks, group.ranks);
    const ByteSpan common = reader.take(group.common_bytes);
    if (group.own_bytes == 0) {
      check_size(common.size(), 0);
      to.append({group.ranks, common, {}});
      continue;
    }
    Reader owns(reader.take(group.own_bytes));
    std::uint32_t left = group.ranks;
    while (left > 0) {
      const auto own = owns.take<OwnHeader>();
      take_ranks(left, own.ranks);
      const ByteSpan part = owns.take(own.bytes);
      check_size(common.size(), part.size());
      to.append({own.ranks, common, part});
    }
    if (!owns.empty()) throw_broken("more than its entries");
  }
  if (ranks > 0) throw_broken("too few entries");
}

void write_slot(std::span<std::byte> slot, const Runs& runs) {
  const std::uint64_t bytes = encoded_bytes(runs);
  std::byte* const begin = put(slot.data(), bytes);
  if (bytes <= slot.size() - sizeof bytes) encode(runs, begin);
}

void read_slot(ByteSpan slot, std::uint32_t ranks, std::size_t capacity, Runs& to) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, slot.data(), sizeof bytes);
  const ByteSpan room = slot.subspan(sizeof bytes);
  if (bytes > room.size()) {
    throw Error(ErrorKind::kInternal,
                "too many of " + std::to_string(ranks) +
                    " ranks announced different requests at once: they have " +
                    std::to_string(bytes) + " bytes, and " + std::to_string(room.size()) +
                    " fit shared memory. Use shorter names");
  }
  decode(room.first(bytes), ranks, capacity, to);
}

void RoundEntries::assign(const Runs& runs, std::span<const int> ranks) {
  if (!ranks.empty() && runs.items().size() > 1) {
    std::vector<const EqualEntries*> by_rank(ranks.size());
    std::size_t place = 0;
    for (const EqualEntries& item : runs.items()) {
      for (std::uint32_t i = 0; i < item.count; ++i) at(by_rank, ranks[place++]) = &item;
    }
    Runs in_order;
    for (const EqualEntries* item : by_rank) in_order.append({1, item->common, item->own});
    assign(in_order);
    return;
  }
  runs_.clear();
  int first = 0;
  for (const EqualEntries& item : runs.items()) {
    runs_.push_back({first, static_cast<int>(item.count), item.common, item.own});
    first += runs_.back().count;
  }
}

}  // namespace torch_ring
