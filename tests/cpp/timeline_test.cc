// SPDX-License-Identifier: Apache-2.0
// Timeline: one file of all ranks, which no rank waits for.
#include "timeline/timeline.h"

#include <fstream>
#include <latch>
#include <optional>
#include <sstream>

#include "message_ranks.h"

namespace torch_ring::test::timeline_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPatience = seconds(30);

/// A file in the working directory that is gone at the end of its test.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& name)
      : path_(name + "." + std::to_string(::getpid()) + ".json") {}
  ~ScratchFile() { ::unlink(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::string text() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

 private:
  const std::string path_;
};

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

OperationRecord record(const std::string& name, std::uint64_t sequence = 1) {
  const std::int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  OperationRecord it;
  it.sequence = it.round = sequence;
  it.state = OperationRecord::State::kFinished;
  it.transport = Transport::kShared;
  it.fingerprint.collective = Collective::kAllreduce;
  it.fingerprint.name = name;
  it.fingerprint.dtype = DType::kFloat32;
  it.bytes = 4096;
  it.is_fused = true;
  it.submitted = now;
  it.agreed = now + 100'000;
  it.started = now + 110'000;
  it.packed = now + 130'000;
  it.reduced = now + 180'000;
  it.finished = now + 200'000;
  return it;
}

Timeline::Options options(int rank, int size, const std::string& path) {
  Timeline::Options it;
  it.rank = rank;
  for (int each = 0; each < size; ++each) it.labels.push_back("rank " + std::to_string(each));
  it.path = path;
  it.interval = milliseconds(5);
  return it;
}

/// A rank's timeline, and the stream of its engine.
class Rank {
 public:
  /// For one of several ranks, as threads.
  Rank(int rank, Planes& planes, const Timeline::Options& options,
       std::size_t capacity = std::size_t{1} << 14)
      : stream_(std::make_shared<RecordStream>(capacity)) {
    MessagesWorld world;
    world.rank = rank;
    world.labels = options.labels;
    world.transfer_timeout = seconds(30);
    std::vector<int> members(planes.size());
    std::iota(members.begin(), members.end(), 0);
    timeline_.emplace(options, std::make_unique<PointToPoint>(*at(planes, rank), kTimelineSet + 1,
                                                              members, world));
    timeline_->watch(stream_);
  }
  /// For a world of one rank.
  explicit Rank(const Timeline::Options& options, std::size_t capacity = 64)
      : stream_(std::make_shared<RecordStream>(capacity)) {
    timeline_.emplace(options, nullptr);
    timeline_->watch(stream_);
  }

  void add(const OperationRecord& record) { stream_->push(record); }
  void stop(milliseconds patience = kPatience) { timeline_->stop(patience); }
  std::uint64_t dropped() const { return timeline_->dropped(); }

 private:
  const std::shared_ptr<RecordStream> stream_;
  std::optional<Timeline> timeline_;
};

TEST(operations_of_one_round_have_one_mark) {
  const ScratchFile file("timeline_round");
  auto asked = options(0, 1, file.path());
  asked.mark_cycles = true;
  Rank rank(asked);
  for (const std::uint64_t round : {1, 1, 2, 2, 2}) rank.add(record("tensor", round));
  OperationRecord other = record("tensor", 1);
  other.set = 7;  // another set has its own rounds
  rank.add(other);
  rank.stop();
  CHECK_EQ(count(file.text(), "CYCLE_START"), 3u);
}

TEST(names_become_json) {
  CHECK_EQ(json_string("a\"b\\c\n\x01"), std::string(R"("a\"b\\c\u000a\u0001")"));
  CHECK_EQ(json_string("\xc3\xa9\xe2\x82\xac"), std::string("\"\xc3\xa9\xe2\x82\xac\""));
  CHECK_EQ(json_string("\xff\xc3"), std::string(R"("\ufffd\ufffd")"));
  CHECK_EQ(json_string("\xed\xa0\x80"), std::string(R"("\ufffd\ufffd\ufffd")"));  // a surrogate
}

TEST(the_file_says_what_was_dropped) {
  const ScratchFile file("timeline_dropped");
  auto asked = options(0, 1, file.path());
  asked.interval = std::chrono::hours(1);  // only the first write and the last one
  Rank rank(asked, 2);
  wait_until([&] { return count(file.text(), "process_name") == 1; }, "the first look");
  for (int i = 0; i < 5; ++i) rank.add(record("tensor"));
  rank.stop();
  CHECK_EQ(rank.dropped(), 3u);
  CHECK_EQ(count(file.text(), "\"name\":\"ALLREDUCE\""), 2u);
  CHECK(file.text().find(
            R"("name":"DROPPED","ph":"i","s":"p","pid":1,"tid":1,"args":{"operations":3})") !=
        std::string::npos);
}

TEST(all_ranks_are_in_one_file) {
  for (const bool several_hosts : {false, true}) {
    const ScratchFile file("timeline_ranks");
    constexpr int kRanks = 4;
    constexpr int kOperations = 3000;  // more than one message
    Planes planes = make_planes(several_hosts ? std::vector{0, 0, 1, 1} : std::vector{0, 0, 0, 0});
    std::latch stopped(kRanks);
    run_ranks(kRanks, [&](int rank) {
      auto asked = options(rank, kRanks, file.path());
      asked.has_clock_of_rank_0 = !several_hosts || rank < 2;
      Rank self(rank, planes, asked);
      for (int i = 0; i < kOperations; ++i) {
        self.add(record("tensor " + std::to_string(rank), static_cast<std::uint64_t>(i)));
      }
      self.stop();
      stopped.arrive_and_wait();
    });
    const std::string text = file.text();
    CHECK(text.ends_with("}\n]\n"));
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string tensor = "\"tensor\":\"allreduce.tensor " + std::to_string(rank) + "\"";
      CHECK_EQ(count(text, tensor), std::size_t{2} * kOperations);
    }
  }
}

TEST(rank_0_alone_can_end_all_timelines) {
  const ScratchFile file("timeline_stop");
  Planes planes = make_planes({0, 0, 0});
  std::latch began(3);
  std::latch ended(3);
  run_ranks(3, [&](int rank) {
    Rank self(rank, planes, options(rank, 3, file.path()));
    self.add(record("before " + std::to_string(rank)));
    wait_until([&] { return count(file.text(), "process_name") == 3; }, "all ranks");
    began.arrive_and_wait();
    if (rank == 0) {
      self.stop();
      for (int each = 0; each < 3; ++each) {
        CHECK_EQ(count(file.text(), ".before " + std::to_string(each) + "\""), 2u);
      }
    }
    ended.arrive_and_wait();
    self.add(record("after"));  // is not written
    self.stop();
  });
  CHECK_EQ(count(file.text(), "after"), 0u);
}

TEST(a_timeline_that_ends_at_once_waits_for_ranks_that_are_about_to_begin) {
  const ScratchFile file("timeline_short");
  Planes planes = make_planes({0, 0});
  std::latch ended(2);
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      wait_until([&] { return !file.text().empty(); }, "rank 0");
      std::this_thread::sleep_for(milliseconds(50));
    }
    Rank self(rank, planes, options(rank, 2, file.path()));
    self.add(record("of rank " + std::to_string(rank)));
    self.stop();
    ended.arrive_and_wait();
  });
  CHECK_EQ(count(file.text(), ".of rank 1\""), 2u);
}

TEST(a_rank_without_an_answer_ends_in_time) {
  const ScratchFile file("timeline_alone");
  Planes planes = make_planes({0, 0});
  Rank rank(1, planes, options(1, 2, file.path()));
  for (int i = 0; i < 100; ++i) rank.add(record("tensor"));
  rank.stop(milliseconds(20));
  CHECK_EQ(rank.dropped(), 0u);
  CHECK(file.text().empty());
}

/// The clock of another host, which has run for three hours more.
Clock::time_point other_clock() { return Clock::now() + std::chrono::hours(3); }

TEST(clocks_of_hosts_are_aligned) {
  const ScratchFile file("timeline_clocks");
  Planes planes = make_planes({0, 1});
  std::latch first(2);
  std::latch second(2);
  std::latch third(2);
  run_ranks(2, [&](int rank) {
    auto asked = options(rank, 2, file.path());
    asked.has_clock_of_rank_0 = rank == 0;
    if (rank == 1) asked.clock = other_clock;
    Rank self(rank, planes, asked);
    const auto add_instant = [&](const std::string& name) {
      OperationRecord it = record(name);
      if (rank == 1) it.submitted = other_clock().time_since_epoch() / std::chrono::nanoseconds(1);
      it.agreed = it.started = it.finished = it.submitted;
      it.is_fused = false;
      self.add(it);
    };
    if (rank == 0) add_instant("first");
    std::this_thread::sleep_for(milliseconds(20));  // more than the clocks may differ
    first.arrive_and_wait();
    if (rank == 1) add_instant("second");
    std::this_thread::sleep_for(milliseconds(20));
    second.arrive_and_wait();
    if (rank == 0) add_instant("third");
    self.stop();
    third.arrive_and_wait();
  });
  const auto time_of = [text = file.text()](const std::string& name) {
    const auto tensor = text.find("\"tensor\":\"allreduce." + name + "\"");
    CHECK(tensor != std::string::npos);
    return std::stod(text.substr(text.rfind("\"ts\":", tensor) + 5));
  };
  CHECK(time_of("first") < time_of("second"));
  CHECK(time_of("second") < time_of("third"));
}

}  // namespace
}  // namespace torch_ring::test::timeline_test
