// SPDX-License-Identifier: Apache-2.0
// Queries: hands the questions and answers of other ranks to the function that reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace torch_ring {

/// The text of a question that the plane answers itself, as a sign of life.
inline constexpr const char* kProbe = "probe";

/// A question to this rank, or the answer to one of its own.
struct Query {
  bool is_question = false;
  int from = 0;              // a rank of the world
  std::uint64_t number = 0;  // of the question, among those of the rank that asks
  std::string text;          // the answer, or kProbe; empty: a question for the reader
};

/// Calls the reader on a thread that exists only while there are queries: they are rare, and the
/// reader may wait for the GIL.
///
/// Thread: any. Blocking: close().
class Queries {
 public:
  using Reader = std::function<void(const Query&)>;

  ~Queries() { close(); }

  /// From now on, `reader` gets the queries; without one they are lost.
  void read_by(Reader reader);

  /// Drops the query if there is no room, because the reader is stuck, or no thread.
  void put(Query query);

  /// Drops the unread queries, and waits for the reader to return.
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
