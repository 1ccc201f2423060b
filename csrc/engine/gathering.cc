#include "engine/gathering.h"

#include <cstring>

namespace torch_ring {

void append_rows(std::vector<std::int64_t>& rows, ByteSpan bytes) {
  if (bytes.empty()) return;
  const std::size_t count = rows.size();
  rows.resize(count + bytes.size() / sizeof(std::int64_t));
  std::memcpy(rows.data() + count, bytes.data(), bytes.size());
}

void Gathering::add(const Run& run, const Announcement& a) {
  if (!a.rows.empty()) {
    for (int i = 0; i < run.count; ++i) append_rows(decision_.rows, a.rows);
  }
  all_shared_ = all_shared_ && a.is_shared;
  all_inline_ = all_inline_ && a.is_inline;
  if (!all_inline_ || is_barrier(collective_)) return;
  const Run& last = round_.runs.back();
  if (decision_.payloads.empty()) {
    decision_.payloads.reserve(static_cast<std::size_t>(last.first + last.count));
  }
  decision_.payloads.insert(decision_.payloads.end(), static_cast<std::size_t>(run.count),
                            a.payload);
}

void Gathering::finish(std::size_t shared_before) {
  decision_.is_inline = all_inline_;
  if (!all_inline_) decision_.payloads.clear();
  if (all_shared_) {
    for (const ByteSpan local : round_.locals) {
      decision_.shared_offsets.push_back(shared_offset(local, shared_before));
    }
  }
}

}  // namespace torch_ring
