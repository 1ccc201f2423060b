// SPDX-License-Identifier: Apache-2.0
// Agreement, entries, and the queue of requests. Pure, no threads.
#include "engine/agreement.h"

#include <algorithm>

#include "engine/entry.h"
#include "engine/executor.h"
#include "engine/request.h"
#include "engine/request_queue.h"
#include "entries.h"
#include "harness.h"

namespace torch_ring::test::agreement_test {
namespace {

TEST(buffers_are_shared_if_those_of_all_hosts_are) {
  const auto shared_at = [](std::int64_t offset) {
    return entry_with({{allreduce("a"), "", {}, 8}, {allreduce("b"), "", {}, offset}});
  };
  const std::vector<Parts> all{shared_at(16), shared_at(24), shared_at(32), shared_at(40)};
  const std::vector<Parts> but_one{shared_at(16), shared_at(24), shared_at(32), shared_at(-1)};
  using Offsets = std::vector<std::int64_t>;
  for (const std::vector<int>& host : {std::vector<int>{1, 2}, {0, 3}}) {
    const auto decided = [&](const std::vector<Parts>& entries) {
      Agreement agreement = among(4);
      auto decisions = agreement.round(MadeRound(entries, host));
      CHECK_EQ(keys(decisions), (Keys{"allreduce.a", "allreduce.b"}));
      CHECK_EQ(decisions[0].shared_offsets, (Offsets{8, 8}));
      return decisions[1].shared_offsets;
    };
    CHECK_EQ(decided(all), host[0] == 1 ? (Offsets{24, 32}) : (Offsets{16, 40}));
    CHECK_EQ(decided(but_one), Offsets{});
  }
}

TEST(shared_offsets_are_kept_until_the_last_rank_announces) {
  Agreement agreement = among(3);
  const std::vector<int> host{0, 1};
  const std::vector<Parts> first{
      entry_with({{allreduce("a"), "", {}, 8}, {allreduce("b"), "", {}, 16}}),
      entry_with({{allreduce("b"), "", {}, 24}}), entry({})};
  CHECK(agreement.round(MadeRound(first, host)).empty());
  const std::vector<Parts> second{entry({}), entry({}), entry_with({{allreduce("b"), "", {}, 32}})};
  const auto decisions = agreement.round(MadeRound(second, host));
  CHECK_EQ(keys(decisions), Keys{"allreduce.b"});
  CHECK_EQ(decisions[0].shared_offsets, (std::vector<std::int64_t>{16, 24}));
}

Fingerprint member(const std::string& name, std::uint32_t group) {
  Fingerprint fingerprint = allreduce(name);
  fingerprint.group = group;
  return fingerprint;
}

TEST(groups_of_different_sizes_end_as_a_whole) {
  for (const bool named : {true, false}) {
    const Keys names = named ? Keys{"g.0", "g.1", "g.2"} : Keys{"#2.7", "#2.7/1", "#2.7/2"};
    Agreement agreement = among(3);
    // Rank 1 has announced only one of its three, rank 2 more than rank 0's group has.
    const auto decisions = round(
        agreement, {entry({member(names[0], 2), member(names[1], 2)}), entry({member(names[0], 3)}),
                    entry({member(names[0], 3), member(names[2], 3), allreduce("other")})});
    std::vector<std::string> ended;
    for (const Decision& decision : decisions) {
      CHECK(decision.mismatch.has_value());
      const std::string text = decision.mismatch->what();
      CHECK(text.find("Sum in a group of 2; rank 1: ") != std::string::npos);
      ended.push_back(decision.key);
    }
    std::sort(ended.begin(), ended.end());
    const std::string prefix = named ? "allreduce." : "";
    CHECK_EQ(ended, (Keys{prefix + names[0], prefix + names[1], prefix + names[2]}));
    const std::string group = named ? "allreduce.g" : "#2.7";
    CHECK_EQ(decisions[0].ended_groups, (Keys{group, group}));
    CHECK_EQ(agreement.waits_for(2), "allreduce 'other' float32 [3] Sum");
    CHECK_EQ(agreement.waits_for(0), "");
  }
}

TEST(ranks_that_have_run_ahead_differently_disagree) {
  const auto after = [](std::uint32_t launches) {
    return entry_with({{.fingerprint = allreduce("a"), .launches = launches}});
  };
  Agreement agreement = among(3);
  const auto decisions = round(agreement, {after(7), after(7), after(6)});
  CHECK(decisions.front().mismatch.has_value());
  const std::string text = decisions.front().mismatch->what();
  CHECK(text.find("rank 0 has launched 7 reductions") != std::string::npos);
  CHECK(text.find("rank 2 6.") != std::string::npos);
  CHECK(!round(agreement, {after(8), after(8), after(8)}).front().mismatch.has_value());
}

TEST(a_group_and_a_single_request_disagree) {
  Agreement agreement = among(2);
  const auto decisions =
      round(agreement, {entry({member("#1", 2), member("#1/1", 2)}), entry({allreduce("#1")})});
  CHECK_EQ(keys(decisions), (Keys{"#1", "#1/1"}));
  CHECK(decisions[0].mismatch && decisions[1].mismatch);
  CHECK(agreement.empty());
}

TEST(a_broken_local_part_is_an_error) {
  const std::vector<Parts> entries(2,
                                   Parts{entry_with({{allreduce("a"), "", {}, 8}}).common, {}, {}});
  CHECK_THROWS(Agreement::unanimous(allreduce("a"), MadeRound(entries, {0, 1})),
               ErrorKind::kInternal, "broken entry");
}

TEST(rows_and_payloads_come_in_the_order_of_ranks) {
  Fingerprint gather = allreduce("g", {});
  gather.collective = Collective::kAllgather;
  const std::vector<Parts> alone{entry_with({{gather, "xy", {2}}}),
                                 entry_with({{gather, "xy", {2}}}),
                                 entry_with({{gather, "z", {1}}})};
  using Texts = std::vector<std::string>;
  const auto check = [&](const Decision& decision) {
    CHECK_EQ(decision.rows, (std::vector<std::int64_t>{2, 2, 1}));
    CHECK(decision.is_inline);
    CHECK_EQ(texts(decision.payloads), (Texts{"xy", "xy", "z"}));
    CHECK(decision.shared_offsets.empty());
  };
  check(*Agreement::unanimous(gather, MadeRound(alone)));
  Agreement agreement = among(3);
  check(agreement.round(MadeRound(alone)).at(0));

  std::vector<Parts> two;  // with another request in the same entries
  for (const std::string data : {"xy", "xy", "z"}) {
    two.push_back(
        entry_with({{allreduce("a")}, {gather, data, {static_cast<std::int64_t>(data.size())}}}));
  }
  auto decisions = agreement.round(MadeRound(two));
  CHECK_EQ(keys(decisions), (Keys{"allreduce.a", "allgather.g"}));
  CHECK(!decisions[0].is_inline);
  check(decisions[1]);

  decisions = agreement.round(MadeRound({two[0], alone[1], alone[2]}));  // not in step
  CHECK_EQ(keys(decisions), Keys{"allgather.g"});
  check(decisions[0]);
  CHECK(agreement.round(MadeRound({entry({}), entry({allreduce("a")}), entry({})})).empty());
}

TEST(requests_in_step_leave_earlier_ones_pending) {
  Agreement agreement = among(3);
  CHECK(round(agreement, {entry({allreduce("early")}), entry({}), entry({})}).empty());
  const Parts both = entry({allreduce("b"), allreduce("a")});
  CHECK_EQ(keys(round(agreement, {both, both, both})), (Keys{"allreduce.b", "allreduce.a"}));
  CHECK_EQ(agreement.missing("allreduce.early"), (std::vector<int>{1, 2}));
  const Parts early = entry({allreduce("early")});
  CHECK_THROWS(round(agreement, {early, early, early}), ErrorKind::kInternal,
               "a rank announced allreduce.early twice");
}

TEST(numbered_requests_of_different_collectives_are_a_mismatch) {
  Agreement agreement = among(2);
  const auto decisions = round(agreement, {entry({allreduce("#1")}), entry({broadcast("#1", 0)})});
  CHECK(decisions.at(0).mismatch.has_value());
}

TEST(mismatch_says_what_to_do) {
  Agreement agreement = among(2);
  const auto decisions =
      round(agreement, {entry({allreduce("a", {3})}), entry({allreduce("a", {4})})});
  CHECK(std::string(decisions.at(0).mismatch->what())
            .ends_with(". All ranks must call the same collectives, in the same order, with the "
                       "same shapes, dtypes and arguments"));
}

TEST(ranks_that_all_wait_for_different_requests_get_a_mismatch) {
  Agreement agreement = among(2);
  CHECK(round(agreement, {entry({allreduce("a")}), entry({broadcast("b", 1)})}).empty());
  CHECK(round(agreement, {entry({}, true), entry({}, false)}).empty());
  const auto decisions = round(agreement, {entry({}, true), entry({}, true)});
  CHECK_EQ(keys(decisions), (Keys{"allreduce.a", "broadcast.b"}));
  const std::string what = decisions[0].mismatch->what();
  CHECK(what.find("rank 0: allreduce 'a'") != std::string::npos);
  CHECK(what.find("rank 1: broadcast 'b' float32 [3] root 1") != std::string::npos);
  CHECK(what.ends_with(". All ranks must call the same collectives, in the same order"));
  CHECK(agreement.empty());
}

TEST(agreement_names_missing_ranks_and_what_ranks_wait_for) {
  Agreement agreement = among(3);
  round(agreement, {entry({allreduce("a")}), entry({}), entry({allreduce("a"), allreduce("b")})});
  CHECK_EQ(agreement.missing("allreduce.a"), std::vector<int>{1});
  CHECK_EQ(agreement.waits_for(1), std::string(""));
  CHECK_EQ(agreement.waits_for(2), std::string("allreduce 'a' float32 [3] Sum and 1 more"));
}

Fingerprint join() {
  Fingerprint fingerprint;
  fingerprint.collective = Collective::kJoin;
  return fingerprint;
}

TEST(requests_are_decided_without_a_joined_rank) {
  Agreement agreement = among(3);
  CHECK(round(agreement, {entry({allreduce("a")}), entry({allreduce("a")}), entry({})}).empty());
  const auto decisions = round(agreement, {entry({}), entry({allreduce("b")}), entry({join()})});
  CHECK_EQ(keys(decisions), Keys{"allreduce.a"});
  CHECK(decisions[0].for_joined == allreduce("a"));
  CHECK(decisions[0].shared_offsets.empty());
  CHECK_EQ(agreement.missing("allreduce.b"), std::vector<int>{0});
  CHECK_EQ(agreement.missing(kJoinKey), (std::vector<int>{0, 1}));
  CHECK_EQ(agreement.waits_for(2), std::string("join"));
}

TEST(join_is_decided_when_the_last_rank_joins) {
  Agreement agreement = among(2);
  CHECK(round(agreement, {entry({}), entry({join()})}).empty());
  const auto decisions = round(agreement, {entry({join()}), entry({})});
  CHECK_EQ(keys(decisions), Keys{kJoinKey});
  CHECK_EQ(decisions[0].last_joined, 0);
  CHECK(decisions[0].resets_numbering);
  CHECK(agreement.empty());
  CHECK_EQ(round(agreement, {entry({join()}), entry({join()})})[0].last_joined, 1);
}

TEST(joined_rank_makes_other_collectives_than_reductions_a_mismatch) {
  Fingerprint scaled = allreduce("scaled");
  scaled.op = ReduceOp::kMin;
  scaled.prescale = -1.0;
  for (const Fingerprint& fingerprint : {broadcast("b", 0), scaled}) {
    Agreement agreement = among(2);
    const auto decisions = round(agreement, {entry({fingerprint}), entry({join()})});
    CHECK(std::string(decisions.at(0).mismatch->what()).find("called join(): rank 1") !=
          std::string::npos);
  }
}

TEST(plan_fusion_groups_requests_by_dtype_and_size) {
  const Fingerprint small = allreduce("s", {10});
  const Fingerprint large = allreduce("l", {1000});
  Fingerprint other = allreduce("o", {10});
  other.dtype = DType::kInt32;
  using Groups = std::vector<std::vector<std::size_t>>;
  const std::vector<const Fingerprint*> requests{&small, &other, &small, &large, &small};
  CHECK_EQ(plan_fusion(requests, 120), (Groups{{0, 2, 4}, {1}, {3}}));
  CHECK_EQ(plan_fusion(requests, 80), (Groups{{0, 2}, {1}, {3}, {4}}));
  CHECK_EQ(plan_fusion({}, 80), Groups{});
}

/// A rank that has joined allocates memory according to the others' shapes.
TEST(decode_throws_for_shapes_that_no_tensor_has) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  Bytes encoded;
  for (const auto& shape : {std::vector<std::int64_t>{2, -1}, {kHuge, kHuge}, {kHuge, 2, kHuge}}) {
    encode(allreduce("a", shape), encoded);
    CHECK_THROWS(decode(encoded), ErrorKind::kInternal, "broken entry");
  }
  for (const auto& shape : {std::vector<std::int64_t>{kHuge, kHuge / 4}, {kHuge, kHuge, 0}, {}}) {
    encode(allreduce("a", shape), encoded);
    CHECK(decode(encoded).shape == shape);
  }
}

TEST(bitwise_operators_are_of_whole_numbers_and_run_on_the_host) {
  Fingerprint fingerprint = allreduce("a");
  fingerprint.device = 1;
  CHECK(!fingerprint.on_host());
  for (const ReduceOp op : {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
    fingerprint.op = op;
    CHECK(fingerprint.on_host());
    Bytes encoded;
    encode(fingerprint, encoded);  // of float32, as no rank announces it
    CHECK_THROWS(decode(encoded), ErrorKind::kInternal, "broken entry");
  }
}

TEST(entry_says_whether_its_rank_is_blocked_and_shares_its_device) {
  EntryWriter writer;
  for (const bool blocked : {false, true}) {
    for (const bool shares : {false, true}) {
      writer.clear(blocked, shares);
      const Post post = writer.post();
      const EntryReader entry(post.common, post.own);
      CHECK_EQ(entry.blocked(), blocked);
      CHECK_EQ(entry.shares_device(), shares);
    }
  }
}

TEST(entries_are_equal_wherever_their_shared_buffers_lie) {
  const Parts here = entry_with({{allreduce("a"), "", {}, 64}});
  const Parts there = entry_with({{allreduce("a"), "", {}, 4096}});
  CHECK(here.common == there.common);
  CHECK(here.own.empty() && there.own.empty());
  CHECK(read(here)[0].is_shared);
  CHECK_EQ(shared_offset(here.local, 0), 64);
  CHECK_EQ(shared_offset(there.local, 0), 4096);
  CHECK_THROWS(shared_offset(here.local, 1), ErrorKind::kInternal, "broken entry");
}

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

TEST(names_of_gradients_in_words) {
  const std::string bucket = "averaging the gradients of backward pass 18 (optimizer 1, bucket 3)";
  const std::string words[][3] = {
      {backward_name(2), "averaging the gradients of backward pass 3", "agreeing on gradients"},
      {backward_name(2) + ".weights", "comparing the ranks' weights in backward pass 3",
       "comparing weights"},
      {backward_name(2) + ".ahead", "comparing backward pass 3 with the other ranks", ""},
      {bucket_name(1, 17, 3, 64), bucket, "averaging gradients"},
      {bucket_name(1, 17, 3, 64) + ".0.header", bucket, ""},
      {"gradients.0.17.sparse.words.weight.1",
       "averaging the sparse gradient of 'words.weight' of backward pass 18", ""},
      {"gradients.0.17.loss", "averaging the closure's loss after backward pass 17",
       "averaging the closure's loss"},
      {"gradients.1.17.carried.head.weight",
       "averaging once more what 'head.weight' had before backward pass 18", "averaging gradients"},
  };
  for (const auto& [name, all, kind] : words) {
    CHECK_EQ(in_words(name).value_or(""), all);
    if (!kind.empty()) CHECK_EQ(kind_in_words(name).value_or(""), kind);
  }
  for (const std::string name :
       {"", "loss.3", "backward", "backward.", "backward.x", "backward.3.other", "gradients.3",
        "gradients.0.1", "gradients.0.1.2", "gradients.weight.0.1.2", "gradients.0.1.bias.0",
        "backward.99999999999999999999"}) {
    CHECK(!in_words(name));
  }
}

TEST(passes_that_nobody_waits_for_are_known_by_their_names) {
  CHECK(planned_pass("backward.17.ahead") == 17u);
  for (const char* name : {"backward.17", "backward.17.weights", "backward..ahead", "17.ahead",
                           "backward.17.ahead.1", "gradients.0.17.0.0", ""}) {
    CHECK(!planned_pass(name));
  }
}

TEST(requests_for_gradients_are_described_in_words) {
  Fingerprint fingerprint;
  fingerprint.shape = {4};
  fingerprint.name = bucket_name(0, 0, 2, 0);
  CHECK_EQ(fingerprint.describe(),
           "averaging the gradients of backward pass 1 (optimizer 0, bucket 2) float32 [4] Sum");
  fingerprint.collective = Collective::kAllgather;
  fingerprint.name = "mine";
  CHECK_EQ(fingerprint.describe(), "allgather 'mine' float32 [*, 4]");
}

}  // namespace
}  // namespace torch_ring::test::agreement_test
