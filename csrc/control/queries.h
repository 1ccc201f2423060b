// Queries: questions and answers of other ranks, on their way to the function that reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace torch_ring {

/// The text of a question that the plane answers itself: does the rank live?
inline constexpr const char* kProbe = "probe";

/// A question to this rank, or the answer to one of its own.
struct Query {
  bool is_question = false;
  int from = 0;              // a rank of the world
  std::uint64_t number = 0;  // of the question, among those of the rank that asks
  std::string text;          // the answer, or kProbe; empty: a question for the reader
};

/// Hands queries to a reader on a thread of their own, which is there while there are any: queries
/// are rare, and the reader may wait for Python's lock.
///
/// Thread: any. Blocking: close().
class Queries {
 public:
  using Reader = std::function<void(const Query&)>;

  ~Queries() { close(); }

  /// From now on, `reader` gets the queries; without one they are lost.
  void read_by(Reader reader);

  /// One that finds no room, because the reader is stuck, or no thread, is lost.
  void put(Query query);

  /// Loses what has not been read, and waits for the reader to return.
  void close();

 private:
  static constexpr std::size_t kMost = 4096;

  void hand_out();

  std::mutex mutex_;
  Reader reader_;
  std::deque<Query> queries_;
  bool is_handing_out_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace torch_ring
