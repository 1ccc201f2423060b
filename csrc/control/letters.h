// Letters: what other ranks ask this one, and what they answer it, until somebody takes them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace torch_ring {

struct Letter {
  bool is_question = false;
  int from = 0;              // a rank of the world
  std::uint64_t number = 0;  // of the question, among those of the rank that asks
  std::string text;          // the answer
};

/// Thread: any. Blocking: take().
class Letters {
 public:
  /// One that finds no room, because nobody takes any, is lost.
  void put(Letter letter) {
    const std::scoped_lock lock(mutex_);
    if (closed_ || letters_.size() == kMost) return;
    letters_.push_back(std::move(letter));
    changed_.notify_one();
  }

  /// The oldest; waits for one. None after close().
  std::optional<Letter> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !letters_.empty(); });
    if (closed_) return std::nullopt;
    Letter letter = std::move(letters_.front());
    letters_.pop_front();
    return letter;
  }

  void close() {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  static constexpr std::size_t kMost = 4096;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Letter> letters_;
  bool closed_ = false;
};

}  // namespace torch_ring
