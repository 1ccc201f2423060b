// Letters: what other ranks ask this one, and what they answer it, on the way to who reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace torch_ring {

/// A question that the plane answers itself: does the rank live?
inline constexpr const char* kProbe = "probe";

struct Letter {
  bool is_question = false;
  int from = 0;              // a rank of the world
  std::uint64_t number = 0;  // of the question, among those of the rank that asks
  std::string text;          // the answer, or kProbe; empty: the rank asks what this one does
};

/// Hands letters to a reader on a thread of their own, which is there while there are any: letters
/// are rare, and the reader may wait for Python's lock.
///
/// Thread: any. Blocking: close().
class Letters {
 public:
  using Reader = std::function<void(const Letter&)>;

  ~Letters() { close(); }

  /// From now on, `reader` gets the letters; without one they are lost.
  void read_by(Reader reader);

  /// One that finds no room, because the reader is stuck, or no thread, is lost.
  void put(Letter letter);

  /// Loses what has not been read, and waits for the reader to return.
  void close();

 private:
  static constexpr std::size_t kMost = 4096;

  void hand_out();

  std::mutex mutex_;
  Reader reader_;
  std::deque<Letter> letters_;
  bool is_handing_out_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace torch_ring
