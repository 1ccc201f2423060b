// SPDX-License-Identifier: Apache-2.0
#include "control/queries.h"

#include <system_error>
#include <utility>

namespace torch_ring {

void Queries::read_by(Reader reader) {
  const std::scoped_lock lock(mutex_);
  if (!closed_) reader_ = std::move(reader);
}

void Queries::put(Query query) {
  const std::scoped_lock lock(mutex_);
  if (closed_ || !reader_ || queries_.size() == kMost) return;
  queries_.push_back(std::move(query));
  if (is_handing_out_) return;
  if (thread_.joinable()) thread_.join();  // it found no query left, and holds the lock no more
  try {
    thread_ = std::thread([this] { hand_out(); });
    is_handing_out_ = true;
  } catch (const std::system_error&) {
    queries_.clear();
  }
}

void Queries::hand_out() {
  std::unique_lock lock(mutex_);
  while (!queries_.empty()) {
    const Query query = std::move(queries_.front());
    queries_.pop_front();
    const Reader reader = reader_;
    lock.unlock();
    reader(query);
    lock.lock();
  }
  is_handing_out_ = false;
}

void Queries::close() {
  Reader reader;  // destroyed without the lock
  std::thread thread;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    queries_.clear();
    reader = std::exchange(reader_, nullptr);
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

}  // namespace torch_ring
