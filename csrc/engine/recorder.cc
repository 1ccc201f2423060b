// SPDX-License-Identifier: Apache-2.0
#include "engine/recorder.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace torch_ring {

namespace {

constexpr std::size_t kFirstEntries = 64;  // enough for a rarely used engine

}  // namespace

Transport transport_among(int size, int hosts) {
  if (size == 1) return Transport::kLocal;
  if (hosts == 1) return Transport::kShared;
  return hosts == size ? Transport::kNetwork : Transport::kHierarchical;
}

const char* name_of(Transport transport) {
  constexpr const char* kNames[] = {"local", "shm", "tcp", "shm+tcp"};
  return kNames[static_cast<std::size_t>(transport)];
}

void RecordStream::push(const OperationRecord& record) {
  const std::size_t end = end_.load(std::memory_order_relaxed);
  const std::size_t next = end + 1 == ring_.size() ? 0 : end + 1;
  if (next == begin_.load(std::memory_order_acquire)) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  ring_[end] = record;  // reuses the memory of its strings
  end_.store(next, std::memory_order_release);
}

void RecordStream::take(std::vector<OperationRecord>& records, std::size_t most) {
  const std::size_t end = end_.load(std::memory_order_acquire);
  std::size_t begin = begin_.load(std::memory_order_relaxed);
  for (; begin != end && most > 0; --most) {
    records.push_back(ring_[begin]);
    begin = begin + 1 == ring_.size() ? 0 : begin + 1;
  }
  begin_.store(begin, std::memory_order_release);
}

Recorder::Recorder(std::uint64_t set, Transport transport)
    : set_(set), transport_(transport), ring_(kFirstEntries) {}

Recorder::Entry& Recorder::next() {
  const std::size_t place = ++submitted_ % kOperations;
  if (place >= ring_.size()) ring_.resize(std::min(kOperations, 2 * ring_.size()));
  return ring_[place];
}

void Recorder::submitted(Work& work) {
  next().in_flight = &work;
  work.number_ = submitted_;
}

OperationRecord Recorder::launching(const Fingerprint& what) {
  Entry& entry = next();
  OperationRecord record;
  record.number = submitted_;
  record.sequence = OperationRecord::kLaunches + ++launches_;
  record.set = set_;
  record.transport = transport_;
  record.state = OperationRecord::State::kStarted;
  record.fingerprint = what;
  record.bytes = what.count() * size_of(what.dtype);
  record.submitted = record.agreed = record.started = in_ns(Clock::now());
  entry.in_flight = nullptr;
  entry.record = record;
  return record;
}

void Recorder::launched(OperationRecord record, const std::string* error) {
  using State = OperationRecord::State;
  finish(record, error == nullptr ? State::kFinished : State::kFailed, error);
  Entry& entry = ring_[record.number % kOperations];
  const bool has_place = entry.in_flight == nullptr && entry.record.number == record.number;
  if (has_place) entry.record = std::move(record);
}

void Recorder::finished(const Work& work) { end(work, OperationRecord::State::kFinished, nullptr); }

void Recorder::failed(const Work& work, const std::string& error) {
  end(work, OperationRecord::State::kFailed, &error);
}

void Recorder::settle(std::uint64_t number, int last_rank) {
  Entry& entry = ring_[number % kOperations];
  if (entry.in_flight == nullptr && entry.record.number == number) {
    entry.record.last_rank = last_rank;
  }
}

void Recorder::end(const Work& work, OperationRecord::State state, const std::string* error) {
  if (work.number_ == 0) return;  // it was never queued
  Entry& entry = ring_[work.number_ % kOperations];
  OperationRecord overtaken;  // by kOperations later ones, one of which has its place
  const bool has_place = entry.in_flight == &work;
  OperationRecord& record = has_place ? entry.record : overtaken;
  if (has_place) entry.in_flight = nullptr;
  write(work, record);
  finish(record, state, error);
}

void Recorder::finish(OperationRecord& record, OperationRecord::State state,
                      const std::string* error) {
  record.finished = in_ns(Clock::now());
  record.state = state;
  if (error != nullptr) record.error = *error;
  count(record);
  if (stream_) stream_->push(record);
}

void Recorder::count(const OperationRecord& record) {
  auto& sums = totals_.sums[static_cast<std::size_t>(record.fingerprint.collective)];
  ++sums.operations;
  sums.bytes += record.bytes;
  if (record.state == OperationRecord::State::kFailed) ++sums.failed;
  if (record.agreed == 0 || record.is_launched()) return;
  sums.waiting += record.agreed - record.submitted;
  sums.running += record.finished - record.agreed;
  if (record.is_inline) ++totals_.inlined;
  if (record.is_fused) ++totals_.fused;
  const auto us = static_cast<std::uint64_t>(record.lag / 1000);
  ++totals_.lags[std::min<std::size_t>(std::bit_width(us), OperationTotals::kLags - 1)];
  totals_.lag += record.lag;
}

void Recorder::write(const Work& work, OperationRecord& record) const {
  const auto time = [](const std::atomic<Clock::time_point>& stamp) {
    return in_ns(stamp.load(std::memory_order_relaxed));
  };
  record.number = work.number_;
  record.sequence = work.times_.sequence.load(std::memory_order_relaxed);
  record.round = work.times_.round.load(std::memory_order_relaxed);
  record.set = set_;
  record.transport = transport_;
  record.fingerprint = work.request_.fingerprint;
  record.bytes = work.request_.input_bytes();
  record.is_inline = work.times_.is_inline.load(std::memory_order_relaxed);
  record.submitted = in_ns(work.submitted_);
  record.agreed = time(work.times_.agreed);
  record.started = time(work.times_.started);
  record.packed = time(work.times_.packed);
  record.reduced = time(work.times_.reduced);
  record.is_fused = record.packed != 0;
  record.finished = 0;
  record.last_rank = work.times_.last_rank.load(std::memory_order_relaxed);
  record.lag = work.times_.lag.load(std::memory_order_relaxed).count();
  record.state = record.started != 0  ? OperationRecord::State::kStarted
                 : record.agreed != 0 ? OperationRecord::State::kAgreed
                                      : OperationRecord::State::kSubmitted;
  record.error.clear();
}

std::vector<OperationRecord> Recorder::records() const {
  std::vector<OperationRecord> records;
  const std::uint64_t first = submitted_ < kOperations ? 1 : submitted_ - kOperations + 1;
  for (std::uint64_t number = first; number <= submitted_; ++number) {
    const Entry& entry = ring_[number % kOperations];
    if (entry.in_flight != nullptr) {
      write(*entry.in_flight, records.emplace_back());
    } else {
      records.push_back(entry.record);
    }
  }
  return records;
}

}  // namespace torch_ring
