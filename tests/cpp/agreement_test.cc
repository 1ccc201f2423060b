// SPDX-License-Identifier: Apache-2.0
// Agreement: decisions from the ranks' entries. Pure, no threads.
#include "engine/agreement.h"

#include <algorithm>
#include <cstring>

#include "engine/executor.h"
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

TEST(equal_requests_are_decided_in_one_round) {
  Agreement agreement = among(3);
  const Parts a = entry({allreduce("a")});
  CHECK_EQ(keys(round(agreement, {a, a, a})), Keys{"allreduce.a"});
  CHECK(agreement.empty());
}

TEST(requests_are_matched_by_name_in_any_order) {
  Agreement agreement = among(2);
  CHECK_EQ(keys(round(agreement, {entry({allreduce("a")}), entry({allreduce("b")})})), Keys{});
  CHECK_EQ(keys(round(agreement, {entry({allreduce("b")}), entry({})})), Keys{"allreduce.b"});
  CHECK_EQ(keys(round(agreement, {entry({}), entry({allreduce("a")})})), Keys{"allreduce.a"});
}

TEST(decisions_have_the_order_of_first_announcements) {
  Agreement agreement = among(2);
  const auto decisions = round(agreement, {entry({allreduce("z"), allreduce("a")}),
                                           entry({allreduce("a"), allreduce("z")})});
  CHECK_EQ(keys(decisions), (Keys{"allreduce.z", "allreduce.a"}));
}

TEST(mismatch_names_both_requests_and_the_name_can_be_used_again) {
  Agreement agreement = among(3);
  const auto decisions = round(
      agreement,
      {entry({allreduce("a", {3})}), entry({allreduce("a", {3})}), entry({allreduce("a", {4})})});
  CHECK_EQ(decisions.size(), 1u);
  const std::string what = decisions[0].mismatch->what();
  CHECK(what.find("rank 0: allreduce 'a' float32 [3]") != std::string::npos);
  CHECK(what.find("rank 2: allreduce 'a' float32 [4]") != std::string::npos);
  CHECK(
      what.ends_with(". All ranks must call the same collectives, in the same order, with the "
                     "same shapes, dtypes and arguments"));
  const Parts again = entry({allreduce("a", {5})});
  CHECK(!round(agreement, {again, again, again})[0].mismatch);
}

TEST(numbered_requests_of_different_collectives_are_a_mismatch) {
  Agreement agreement = among(2);
  const auto decisions = round(agreement, {entry({allreduce("#1")}), entry({broadcast("#1", 0)})});
  CHECK(decisions.at(0).mismatch.has_value());
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

TEST(unnamed_barrier_resets_the_numbering) {
  Agreement agreement = among(2);
  Fingerprint barrier;
  barrier.collective = Collective::kBarrier;
  for (const char* name : {"#barrier.1", "named"}) {
    barrier.name = name;
    const Parts a = entry({barrier});
    CHECK_EQ(round(agreement, {a, a}).at(0).resets_numbering, name[0] == '#');
    CHECK(round(agreement, {a, entry({})}).empty());
    CHECK_EQ(round(agreement, {entry({}), a}).at(0).resets_numbering, name[0] == '#');
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

}  // namespace
}  // namespace torch_ring::test::agreement_test
