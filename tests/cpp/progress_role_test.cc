// SPDX-License-Identifier: Apache-2.0
// ProgressRole and Driver without an engine: one rank, on which this thread makes progress.
#include <thread>

#include "engine/engine.h"
#include "test_world.h"

namespace torch_ring::test::progress_role_test {
namespace {

/// A role with all parts of its driver; records the driver's callbacks.
class Alone : private Driver::Callbacks {
 public:
  Alone()
      : world_(std::move(make_worlds({0}).front())),
        communicator_(make_communicator(world_, patient(), abort_)),
        watchdog_(nullptr, 0, {0}, world_.labels, "shutdown()", abort_, [] {}),
        role_(
            *communicator_, abort_, watchdog_, queue_, static_cast<Driver::Callbacks&>(*this),
            Driver::Options{patient(), world_.labels, nullptr, [](const std::string&) {}, {}, {}}) {
  }

  RequestQueue::Lock lock() { return queue_.lock(); }
  ProgressRole& role() { return role_; }
  int completed() const { return completed_; }

  std::shared_ptr<Work> add(std::vector<float>& values, const std::string& name) {
    Request request;
    request.fingerprint.name = name;
    request.fingerprint.shape = {static_cast<std::int64_t>(values.size())};
    request.input = request.output = values.data();
    auto work = RequestQueue::make_work(std::move(request));
    queue_.add(queue_.lock(), {&work, 1});
    return work;
  }

 private:
  void completed(const Driver::Lock&) override { ++completed_; }
  void set_device_busy(bool) override {}
  bool should_yield() override { return false; }
  void pause(const Driver::Interrupt&) override {}

  Abort abort_;
  World world_;
  std::shared_ptr<HostCommunicator> communicator_;
  Watchdog watchdog_;
  RequestQueue queue_{"rank 0"};
  ProgressRole role_;
  int completed_ = 0;
};

bool on_another_thread(const std::function<bool()>& ask) {
  bool answer = false;
  std::thread([&] { answer = ask(); }).join();
  return answer;
}

TEST(driver_makes_progress_until_there_is_nothing_to_do) {
  Alone alone;
  std::vector<float> a(5, 1.0f);
  std::vector<float> b(50'000, 1.0f);
  const auto works = {alone.add(a, "a"), alone.add(b, "b")};
  auto lock = alone.lock();
  const ProgressRole::Turn turn(alone.role(), lock);
  CHECK(turn.driver().idle());
  turn.driver().take_submitted(lock);
  CHECK(!turn.driver().idle());
  lock.unlock();
  turn.driver().make_progress(nullptr, {});
  lock.lock();
  CHECK(turn.driver().idle());
  for (const auto& work : works) CHECK(work->done() && !work->failed());
  CHECK_EQ(alone.completed(), 2);
}

TEST(driver_fails_what_is_submitted_and_what_it_holds) {
  Alone alone;
  std::vector<float> values(5);
  const auto taken = alone.add(values, "taken");
  auto lock = alone.lock();
  const ProgressRole::Turn turn(alone.role(), lock);
  turn.driver().take_submitted(lock);
  lock.unlock();
  const auto submitted = alone.add(values, "submitted");
  lock.lock();
  turn.driver().fail_all(lock, Error(ErrorKind::kPeerLost, "rank 1 died"));
  CHECK_THROWS(taken->check(), ErrorKind::kPeerLost, "'taken' float32 [5] Sum: rank 1 died");
  CHECK_THROWS(submitted->check(), ErrorKind::kPeerLost, "'submitted'");
  CHECK(turn.driver().idle());
}

TEST(role_belongs_to_one_thread_and_is_needed_while_works_are_left) {
  Alone alone;
  ProgressRole& role = alone.role();
  std::vector<float> values(5);
  const auto work = alone.add(values, "a");
  auto lock = alone.lock();
  CHECK(!role.is_taken(lock) && !role.is_mine(lock) && !role.is_needed(lock));
  {
    const ProgressRole::Turn turn(role, lock);
    turn.driver().take_submitted(lock);
    CHECK(role.is_taken(lock) && role.is_mine(lock) && !role.is_paused_here(lock));
    CHECK(!role.is_needed(lock));
    CHECK(!on_another_thread([&] { return role.is_mine(lock); }));
  }
  CHECK(!role.is_taken(lock) && role.is_needed(lock));
}

TEST(role_is_kept_in_a_pause_in_which_its_thread_may_take_a_turn_or_lend_it) {
  Alone alone;
  ProgressRole& role = alone.role();
  auto lock = alone.lock();
  const ProgressRole::Turn turn(role, lock);
  role.pause([&] {
    CHECK(role.is_paused_here(lock));
    CHECK(!on_another_thread([&] { return role.is_paused_here(lock); }));
    {
      const ProgressRole::Turn inner(role, lock);
      CHECK(role.is_mine(lock) && !role.is_paused_here(lock));
    }
    CHECK(role.is_paused_here(lock));

    role.lend(lock);
    CHECK(!role.is_taken(lock));
    CHECK(on_another_thread([&] {
      const ProgressRole::Turn other(role, lock);
      return role.is_mine(lock);
    }));
    role.take_back(lock);
    CHECK(role.is_paused_here(lock));
  });
  CHECK(role.is_mine(lock) && !role.is_paused_here(lock));
}

}  // namespace
}  // namespace torch_ring::test::progress_role_test
