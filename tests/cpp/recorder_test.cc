// SPDX-License-Identifier: Apache-2.0
// Recorder and RecordStream, and the engine's records on every layout.
#include "engine/recorder.h"

#include <thread>

#include "engine_ranks.h"
#include "harness.h"

namespace torch_ring::test::recorder_test {
namespace {

using State = OperationRecord::State;

std::shared_ptr<Work> add(RequestQueue& queue, const std::string& name) {
  Request request;
  request.fingerprint.name = name;
  request.fingerprint.shape = {3};
  auto work = RequestQueue::make_work(std::move(request));
  queue.add(queue.lock(), {&work, 1});
  return work;
}

std::vector<OperationRecord> records(RequestQueue& queue) {
  const auto lock = queue.lock();
  return queue.recorder(lock).records();
}

TEST(recorder_keeps_the_last_2000_operations_and_those_in_flight) {
  RequestQueue queue("rank 0", 7, Transport::kShared);
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 1; i <= 2100; ++i) {
    works.push_back(add(queue, "x" + std::to_string(i)));
    if (i % 2 == 0) queue.complete(queue.lock(), *works.back());
  }
  const auto found = records(queue);
  CHECK_EQ(found.size(), Recorder::kOperations);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const OperationRecord& record = found[i];
    CHECK_EQ(record.number, i + 101);
    CHECK_EQ(record.fingerprint.name, "x" + std::to_string(i + 101));
    CHECK(record.state == (record.number % 2 == 0 ? State::kFinished : State::kSubmitted));
    CHECK_EQ(record.finished != 0, record.number % 2 == 0);
    CHECK_EQ(record.set, 7u);
    CHECK_EQ(record.bytes, 12u);
    CHECK(record.transport == Transport::kShared);
  }
  // An operation overtaken by 2000 others overwrites none of them.
  queue.complete(queue.lock(), *works[0]);
  CHECK_EQ(records(queue)[0].number, 101u);
  for (auto& work : works) {
    if (!work->done()) queue.complete(queue.lock(), *work);
  }
}

TEST(record_stream_drops_and_counts_what_finds_no_room) {
  RecordStream stream(3);
  std::vector<OperationRecord> taken;
  OperationRecord record;
  for (int i = 0; i < 10; ++i) {
    record.number = static_cast<std::uint64_t>(i);
    stream.push(record);
  }
  stream.take(taken, 2);
  CHECK(taken.size() == 2 && taken[0].number == 0 && taken[1].number == 1);
  stream.push(record);
  stream.take(taken, 100);
  CHECK(taken.size() == 4 && taken[2].number == 2 && taken[3].number == 9);
  CHECK_EQ(stream.dropped(), 7u);
}

TEST(record_stream_hands_records_from_thread_to_thread) {
  constexpr std::uint64_t kRecords = 20'000;
  RecordStream stream(16);
  std::vector<OperationRecord> taken;
  std::thread writer([&] {
    OperationRecord record;
    for (std::uint64_t i = 0; i < kRecords; ++i) {
      record.number = i;
      record.fingerprint.name = "name " + std::to_string(i);
      stream.push(record);
    }
  });
  while (taken.size() + stream.dropped() < kRecords) stream.take(taken, 4);
  writer.join();
  stream.take(taken, kRecords);
  CHECK_EQ(taken.size() + stream.dropped(), kRecords);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    CHECK_EQ(taken[i].fingerprint.name, "name " + std::to_string(taken[i].number));
    CHECK(i == 0 || taken[i - 1].number < taken[i].number);
  }
}

const bool kLast = on_all_layouts(
    "every rank knows who came last, and how long it waited",
    [](Rank& rank) {
      using std::chrono::milliseconds;
      constexpr milliseconds kLate{150};
      std::vector<float> values = rank.input(3);
      rank.allreduce_now(values, "begin");
      for (const int late : {0, rank.size() - 1}) {
        if (rank.rank() == late) std::this_thread::sleep_for(kLate);
        rank.allreduce_now(values, "of." + std::to_string(late));
        rank.allreduce_now(values, "then");  // makes the last rank known
        const std::vector<OperationRecord> records = rank.engine().records();
        const OperationRecord& record = records[records.size() - 2];
        if (rank.rank() != late) CHECK_EQ(record.last_rank, late);
        // The others may have been late for this, too, by less.
        CHECK(rank.rank() == late || std::chrono::nanoseconds(record.lag) > kLate / 3);
        CHECK(rank.rank() != late || std::chrono::nanoseconds(record.lag) < kLate);
      }
    },
    2);

}  // namespace
}  // namespace torch_ring::test::recorder_test
