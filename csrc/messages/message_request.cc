// SPDX-License-Identifier: Apache-2.0
#include "messages/message_request.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace torch_ring {

namespace {

constexpr std::chrono::milliseconds kInterrupts{50};

/// An error that shares no memory with this one, since each waiting thread needs its own.
Error copy_of(const Error& error) { return {error.kind(), error.what()}; }

}  // namespace

bool MessageRequest::done() const {
  const std::scoped_lock lock(mutex_);
  return done_;
}

void MessageRequest::wait(const Interrupt& interrupt) {
  wait_until(Clock::time_point::max(), interrupt);
}

bool MessageRequest::wait_until(Clock::time_point deadline, const Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  while (!done_) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    ended_.wait_until(lock, std::min(deadline, now + kInterrupts), [&] { return done_; });
    if (done_ || !interrupt) continue;
    lock.unlock();
    interrupt();
    lock.lock();
  }
  if (error_) throw copy_of(*error_);
  return true;
}

std::exception_ptr MessageRequest::error() const {
  const std::scoped_lock lock(mutex_);
  return error_ ? std::make_exception_ptr(copy_of(*error_)) : nullptr;
}

int MessageRequest::source() const {
  const std::scoped_lock lock(mutex_);
  return source_;
}

std::size_t MessageRequest::bytes() const {
  const std::scoped_lock lock(mutex_);
  return bytes_;
}

std::string MessageRequest::describe() const {
  MessageRecord asked;
  asked.is_send = spec_.is_send;
  asked.tag = spec_.tag;
  asked.dtype = spec_.dtype;
  asked.bytes = spec_.memory.size();
  return asked.describe();
}

MessageRecord MessageRequest::record() const {
  const auto time = [](Clock::time_point at) {
    return at == Clock::time_point{} ? std::int64_t{0} : in_ns(at);
  };
  MessageRecord record;
  record.is_send = spec_.is_send;
  record.tag = spec_.tag;
  record.dtype = spec_.dtype;
  const std::scoped_lock lock(mutex_);
  record.number = number_;
  record.peer = source_ >= 0 ? source_ : spec_.peer.value_or(-1);
  record.bytes = source_ >= 0 ? bytes_ : spec_.memory.size();
  record.posted = time(posted_);
  record.matched = time(matched_);
  record.finished = time(finished_);
  if (error_) record.error = error_->what();
  using State = MessageRecord::State;
  record.state = error_                ? State::kFailed
                 : done_               ? State::kFinished
                 : record.matched != 0 ? State::kMatched
                                       : State::kPosted;
  return record;
}

void MessageRequest::count_with(std::shared_ptr<MessageCounters> counters, std::uint64_t number) {
  counters_ = std::move(counters);
  number_ = number;
  posted_ = Clock::now();
}

void MessageRequest::matched(int peer, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  source_ = peer;
  bytes_ = bytes;
  matched_ = Clock::now();
}

void MessageRequest::finish(std::optional<Error> error) {
  std::shared_ptr<void> owner;  // destroyed after the lock is released: it may free tensors
  std::function<void()> received;
  {
    const std::scoped_lock lock(mutex_);
    if (done_) return;
    done_ = true;
    finished_ = Clock::now();
    error_ = std::move(error);
    if (counters_ && error_) counters_->failed(spec_.is_send);  // before anybody sees the end
    if (counters_ && !error_) {
      counters_->finished(spec_.is_send, spec_.is_send ? spec_.memory.size() : bytes_);
    }
    owner.swap(spec_.owner);
    received.swap(spec_.received);
  }
  ended_.notify_all();
}

void MessageRequest::finish(int source, std::size_t bytes) {
  std::optional<Error> error;
  try {
    if (spec_.received) spec_.received();
  } catch (const std::exception& failed) {
    error = Error(ErrorKind::kInvalidArgument, describe() + ": " + failed.what());
  }
  {
    const std::scoped_lock lock(mutex_);
    source_ = source;
    bytes_ = bytes;
  }
  finish(std::move(error));
}

void MessageRecorder::posted(const std::shared_ptr<MessageRequest>& request) {
  std::shared_ptr<MessageRequest> oldest;  // destroyed without the lock
  const std::scoped_lock lock(mutex_);
  request->count_with(counters_, ++posted_);
  last_.push_back(request);
  if (last_.size() <= kMessages) return;
  oldest = std::move(last_.front());
  last_.pop_front();
}

std::vector<MessageRecord> MessageRecorder::records() const {
  std::deque<std::shared_ptr<MessageRequest>> last;
  {
    const std::scoped_lock lock(mutex_);
    last = last_;
  }
  std::vector<MessageRecord> records;
  records.reserve(last.size());
  for (const auto& request : last) records.push_back(request->record());
  return records;
}

}  // namespace torch_ring
