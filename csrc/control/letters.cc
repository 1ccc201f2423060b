#include "control/letters.h"

#include <system_error>
#include <utility>

namespace torch_ring {

void Letters::read_by(Reader reader) {
  const std::scoped_lock lock(mutex_);
  if (!closed_) reader_ = std::move(reader);
}

void Letters::put(Letter letter) {
  const std::scoped_lock lock(mutex_);
  if (closed_ || !reader_ || letters_.size() == kMost) return;
  letters_.push_back(std::move(letter));
  if (is_handing_out_) return;
  if (thread_.joinable())
    thread_.join();  // it has seen that nothing was left, without the lock now
  try {
    thread_ = std::thread([this] { hand_out(); });
    is_handing_out_ = true;
  } catch (const std::system_error&) {
    letters_.clear();
  }
}

void Letters::hand_out() {
  std::unique_lock lock(mutex_);
  while (!letters_.empty()) {
    const Letter letter = std::move(letters_.front());
    letters_.pop_front();
    const Reader reader = reader_;
    lock.unlock();
    reader(letter);
    lock.lock();
  }
  is_handing_out_ = false;
}

void Letters::close() {
  Reader reader;  // destroyed without the lock
  std::thread thread;
  {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    letters_.clear();
    reader = std::exchange(reader_, nullptr);
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

}  // namespace torch_ring
