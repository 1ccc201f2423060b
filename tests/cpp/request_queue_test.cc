// SPDX-License-Identifier: Apache-2.0
// RequestQueue alone: names in flight, numbers and eras, groups, the end of a work.
#include "engine/request_queue.h"

#include <thread>

#include "harness.h"

namespace torch_ring::test::request_queue_test {
namespace {

using Works = std::deque<std::shared_ptr<Work>>;

std::shared_ptr<Work> make(const std::string& name,
                           Collective collective = Collective::kAllreduce) {
  Request request;
  request.fingerprint.collective = collective;
  request.fingerprint.name = name;
  request.fingerprint.shape = {3};
  return RequestQueue::make_work(std::move(request));
}

std::shared_ptr<Work> add(RequestQueue& queue, const std::string& name,
                          Collective collective = Collective::kAllreduce) {
  auto work = make(name, collective);
  queue.add(queue.lock(), {&work, 1});
  return work;
}

Works take(RequestQueue& queue) {
  Works works;
  queue.take(queue.lock(), works);
  return works;
}

std::string error_text(const Work& work) {
  try {
    work.check();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

std::string name_of(const std::shared_ptr<Work>& work) { return work->request().fingerprint.name; }

TEST(a_group_has_one_number) {
  RequestQueue queue("rank 2");
  add(queue, "");
  std::vector<std::shared_ptr<Work>> group;
  for (int i = 0; i < 3; ++i) {
    Request request;
    request.fingerprint.group = 3;
    group.push_back(RequestQueue::make_work(std::move(request)));
  }
  queue.add(queue.lock(), group);
  CHECK_EQ(name_of(group[0]), "#2");
  CHECK_EQ(name_of(group[1]), "#2/1");
  CHECK_EQ(name_of(group[2]), "#2/2");
  CHECK_EQ(name_of(add(queue, "")), "#3");
}

TEST(queue_hands_works_over_once_in_the_order_of_submission) {
  RequestQueue queue("rank 2");
  CHECK(!queue.has_works());
  const auto first = add(queue, "first");
  const auto second = add(queue, "second");
  CHECK(queue.has_works());
  CHECK_EQ(queue.bytes(queue.lock()), 2 * 3 * sizeof(float));

  Works works{make("earlier")};
  queue.take(queue.lock(), works);
  CHECK(works.size() == 3 && works[1] == first && works[2] == second);
  CHECK(!queue.has_works());
  CHECK_EQ(queue.bytes(queue.lock()), 0u);
  CHECK(take(queue).empty());
}

TEST(queue_keeps_a_name_until_its_work_is_done) {
  RequestQueue queue("rank 2");
  const auto work = add(queue, "a");
  const std::string refused = "rank 2: allreduce 'a' float32 [3] Sum is in flight already";
  CHECK_THROWS(add(queue, "a"), ErrorKind::kInvalidArgument, refused);
  take(queue);  // maybe announced, but not done
  CHECK_THROWS(add(queue, "a"), ErrorKind::kInvalidArgument, refused);
  add(queue, "a", Collective::kBroadcast);  // each collective has names of its own

  queue.complete(queue.lock(), *work);
  CHECK(work->done() && !work->failed());
  const auto again = add(queue, "a");
  queue.fail(queue.lock(), *again, Error(ErrorKind::kMismatch, "the ranks disagree"));
  CHECK(again->done() && again->failed());
  CHECK_THROWS(again->check(), ErrorKind::kMismatch,
               "rank 2: allreduce 'a' float32 [3] Sum: the ranks disagree");
  add(queue, "a");
}

TEST(queue_names_a_failed_request_once) {
  RequestQueue queue("rank 2");
  const auto late = add(queue, "a");
  const auto other = add(queue, "b");
  const Error cause(ErrorKind::kTimeout, "allreduce 'a' float32 [3] Sum: gave up");
  queue.fail(queue.lock(), *late, cause);
  queue.fail(queue.lock(), *other, cause);
  CHECK_EQ(error_text(*late), "rank 2: allreduce 'a' float32 [3] Sum: gave up");
  CHECK_EQ(error_text(*other),
           "rank 2: allreduce 'b' float32 [3] Sum: allreduce 'a' float32 [3] Sum: gave up");
}

TEST(queue_takes_a_group_whole_or_not_at_all) {
  RequestQueue queue("rank 0");
  const auto first = add(queue, "c");
  take(queue);
  const std::vector<std::shared_ptr<Work>> group{make("a"), make("b"), make("c")};
  CHECK_THROWS(queue.add(queue.lock(), group), ErrorKind::kInvalidArgument, "'c'");
  CHECK(!queue.has_works());
  CHECK_EQ(queue.bytes(queue.lock()), 0u);

  queue.complete(queue.lock(), *first);
  queue.add(queue.lock(), group);  // none of its names has stayed in flight
  CHECK_EQ(take(queue).size(), 3u);
}

TEST(queue_numbers_works_without_a_name_and_anew_in_each_era) {
  RequestQueue queue("rank 0");
  CHECK_EQ(name_of(add(queue, "")), "#1");
  CHECK_EQ(name_of(add(queue, "named")), "named");
  CHECK_EQ(name_of(add(queue, "", Collective::kBroadcast)), "#2");
  CHECK_EQ(name_of(add(queue, "", Collective::kBarrier)), "#barrier.1");
  queue.reset_numbering(queue.lock());
  CHECK_EQ(name_of(add(queue, "")), "#1.1");
  CHECK_EQ(name_of(add(queue, "", Collective::kBarrier)), "#1.barrier.1");
  queue.reset_numbering(queue.lock());
  CHECK_EQ(name_of(add(queue, "")), "#2.1");
}

TEST(queue_refuses_reserved_names_and_very_long_ones) {
  CHECK_THROWS(make("#1"), ErrorKind::kInvalidArgument, "'#1' is reserved");
  make(std::string(4096, 'x'));
  CHECK_THROWS(make(std::string(4097, 'x')), ErrorKind::kInvalidArgument, "longer than 4096");
}

TEST(queue_knows_whether_several_threads_submit) {
  RequestQueue queue("rank 0");
  CHECK(!queue.has_several_submitters(queue.lock()));
  add(queue, "");
  add(queue, "");
  CHECK(!queue.has_several_submitters(queue.lock()));
  std::thread([&] { add(queue, ""); }).join();
  CHECK(queue.has_several_submitters(queue.lock()));
}

TEST(queue_loses_nothing_between_threads) {
  // Four submitters, and this thread as the progress thread.
  RequestQueue queue("rank 0");
  constexpr int kEach = 200;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const auto work = add(queue, std::to_string(t));
        while (!work->done()) std::this_thread::yield();  // afterwards the name is free again
      }
    });
  }
  for (int done = 0; done < 4 * kEach;) {
    if (!queue.has_works()) continue;
    for (const auto& work : take(queue)) {
      queue.complete(queue.lock(), *work);
      ++done;
    }
  }
  for (auto& thread : threads) thread.join();
  CHECK(!queue.has_works());
}

}  // namespace
}  // namespace torch_ring::test::request_queue_test
