// SPDX-License-Identifier: Apache-2.0
// Recorder: a rank's last operations, with the times of their phases; RecordStream: all of them,
// for an observer.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"

namespace torch_ring {

/// The transport of the data of an engine's operations.
enum class Transport : std::uint8_t {
  kLocal,         // there is one rank
  kShared,        // shared memory: all ranks are on one host
  kNetwork,       // connections: one rank a host
  kHierarchical,  // shared memory inside hosts, connections between them
};

/// "shm": its name in records, spans and logs.
const char* name_of(Transport transport);
Transport transport_among(int size, int hosts);

/// One operation of a rank. Times are nanoseconds of Clock; 0: not yet.
struct OperationRecord {
  enum class State : std::uint8_t {
    kSubmitted,  // requested by this rank, but maybe not by all
    kAgreed,     // requested by all ranks
    kStarted,    // its data move
    kFinished,   // on a device: enqueued
    kFailed,
  };

  static constexpr std::uint64_t kLaunches = std::uint64_t{1} << 44;
  bool is_launched() const { return sequence > kLaunches; }

  std::uint64_t number = 0;  // in the order of this rank's submissions to its engine, from 1
  // In the order of agreements, from 1, the same on all ranks of the set; 0 before the agreement.
  // Of an operation without an agreement (Engine::launch()): above kLaunches, in the order of
  // launches, also the same on all ranks.
  std::uint64_t sequence = 0;
  std::uint64_t round = 0;  // of the board, in which the ranks agreed
  std::uint64_t set = 0;    // the process set's number
  State state = State::kSubmitted;
  Transport transport = Transport::kLocal;
  Fingerprint fingerprint;  // operation, name, dtype, shape, operator, root, device
  std::uint64_t bytes = 0;  // Request::input_bytes()
  bool is_inline = false;   // the data travelled with the agreement: `started` stays 0
  bool is_fused = false;    // reduced in one buffer with others: has `packed` and `reduced`

  std::int64_t submitted = 0;
  std::int64_t agreed = 0;
  std::int64_t started = 0;
  std::int64_t packed = 0;   // the inputs are in the fusion buffer
  std::int64_t reduced = 0;  // the results are there
  std::int64_t finished = 0;

  // The rank, in the set, that was the last to request it; -1: unknown. Known from the set's next
  // agreement on, and only if this rank waited for a millisecond or more.
  int last_rank = -1;
  std::int64_t lag = 0;  // ns that this rank waited for it

  std::string error;  // of a failed one
};

/// Sums over all operations of an engine that have ended.
struct OperationTotals {
  static constexpr std::size_t kCollectives = static_cast<std::size_t>(Collective::kJoin) + 1;
  static constexpr std::size_t kLags = 26;  // up to 2^24 us, which is 17 s, and above

  struct Sums {
    std::uint64_t operations = 0;
    std::uint64_t failed = 0;  // of these
    std::uint64_t bytes = 0;   // Request::input_bytes()
    std::int64_t waiting = 0;  // ns from submission to agreement, of the agreed ones
    std::int64_t running = 0;  // ns from agreement to end, of the agreed ones
  };
  std::array<Sums, kCollectives> sums;  // by Collective
  std::uint64_t inlined = 0;
  std::uint64_t fused = 0;
  // [i]: the agreed operations for which this rank waited less than 2^i us, and not less than
  // 2^(i-1).
  std::array<std::uint64_t, kLags> lags{};
  std::int64_t lag = 0;      // ns, the sum
  std::uint64_t rounds = 0;  // of the agreement: the driver counts them
};

/// The records of one engine on their way to an observer, such as the thread that writes a
/// timeline: a ring that one thread fills and another one empties. If the observer is too slow,
/// records are dropped and counted; the engine never waits.
///
/// Thread: push() one at a time (the engine holds its queue's mutex), take() one at a time.
/// Blocking: no.
class RecordStream {
 public:
  /// `capacity`: the most records that wait for take(); about 300 bytes each.
  explicit RecordStream(std::size_t capacity) : ring_(capacity + 1) {}

  void push(const OperationRecord& record);

  /// Moves at most `most` records to the end of `records`, oldest first.
  void take(std::vector<OperationRecord>& records, std::size_t most);

  /// The number of dropped records so far.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  std::vector<OperationRecord> ring_;
  // The writer releases new records by end_, the reader releases room by begin_; each acquires the
  // other's. Equal: empty.
  std::atomic<std::size_t> begin_{0};
  std::atomic<std::size_t> end_{0};
  std::atomic<std::uint64_t> dropped_{0};
};

/// The flight recorder of an engine. An operation enters when it is submitted. While it is in
/// flight, its record is made from its Work on demand; when it is done, the record is written to
/// the ring, in place of the one that is kOperations older. So a submission costs two stores, and a
/// completion a copy of the fingerprint, into reused memory once the ring is full.
///
/// Thread: with the queue's lock (RequestQueue calls it), except the constructor.
/// Blocking: no. Errors: none but bad_alloc.
class Recorder {
 public:
  static constexpr std::size_t kOperations = 2000;

  Recorder(std::uint64_t set, Transport transport);

  void submitted(Work& work);
  void finished(const Work& work);  // before its waiters see it
  void failed(const Work& work, const std::string& error);

  /// Begins the record of a launch. Pass it to launched() when the launch is enqueued, or has
  /// failed.
  OperationRecord launching(const Fingerprint& what);
  void launched(OperationRecord record, const std::string* error);

  /// Sets the rank that was the last to request an operation, which has ended.
  void settle(std::uint64_t number, int last_rank);

  /// The last operations, oldest first, including those in flight.
  std::vector<OperationRecord> records() const;

  /// Of all operations that have ended.
  const OperationTotals& totals() const { return totals_; }

  /// Sends every record from now on to `stream`, when its operation ends. Null: nowhere.
  void observe(std::shared_ptr<RecordStream> stream) { stream_ = std::move(stream); }

 private:
  struct Entry {
    const Work* in_flight = nullptr;  // if set, `record` is not written yet
    OperationRecord record;
  };

  Entry& next();
  void finish(OperationRecord& record, OperationRecord::State state, const std::string* error);
  void end(const Work& work, OperationRecord::State state, const std::string* error);
  void write(const Work& work, OperationRecord& record) const;
  void count(const OperationRecord& record);

  const std::uint64_t set_;
  const Transport transport_;
  std::vector<Entry> ring_;  // operation n is in [n % kOperations]; grows until it has all
  std::uint64_t submitted_ = 0;
  std::uint64_t launches_ = 0;
  OperationTotals totals_;
  std::shared_ptr<RecordStream> stream_;
};

}  // namespace torch_ring
