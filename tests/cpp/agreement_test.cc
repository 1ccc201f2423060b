// Agreement: decisions from the ranks' entries. Pure, no threads.
#include "engine/agreement.h"

#include "engine/fusion.h"
#include "harness.h"

namespace torch_ring {
namespace {

Fingerprint allreduce(const std::string& name, std::vector<std::int64_t> shape = {3}) {
  Fingerprint fingerprint;
  fingerprint.shape = std::move(shape);
  fingerprint.name = name;
  return fingerprint;
}

Fingerprint broadcast(const std::string& name, int root) {
  Fingerprint fingerprint = allreduce(name);
  fingerprint.collective = Collective::kBroadcast;
  fingerprint.root = root;
  return fingerprint;
}

/// A rank's entry with these requests.
Bytes entry(const std::vector<Fingerprint>& requests, bool blocked = false) {
  EntryWriter writer;
  writer.clear(blocked);
  for (const Fingerprint& request : requests) {
    Bytes fingerprint;
    encode(request, fingerprint);
    Announcement announcement;
    announcement.fingerprint = fingerprint;
    writer.append(announcement);
  }
  return {writer.bytes().begin(), writer.bytes().end()};
}

std::vector<Decision> round(Agreement& agreement, const std::vector<Bytes>& entries) {
  const std::vector<ByteSpan> spans(entries.begin(), entries.end());
  return agreement.round(spans);
}

std::vector<std::string> keys(const std::vector<Decision>& decisions) {
  std::vector<std::string> keys;
  for (const Decision& decision : decisions) keys.push_back(decision.key);
  return keys;
}

using Keys = std::vector<std::string>;

Agreement among(int size) {
  std::vector<std::string> labels;
  for (int rank = 0; rank < size; ++rank) labels.push_back("rank " + std::to_string(rank));
  return Agreement(labels);
}

TEST(fingerprint_is_equal_after_encode_and_decode) {
  Fingerprint fingerprint = broadcast("layer.0.weight", 2);
  fingerprint.dtype = DType::kBFloat16;
  fingerprint.prescale = 0.5;
  fingerprint.shape = {4, 0, 7};
  Bytes encoded;
  encode(fingerprint, encoded);
  CHECK(decode(encoded) == fingerprint);
}

/// A rank that has joined takes as much memory as the others' shapes say.
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

TEST(parse_entry_throws_for_truncated_entries) {
  const Bytes whole = entry({allreduce("a"), allreduce("b")});
  for (std::size_t bytes = 0; bytes < whole.size(); bytes += 3) {
    CHECK_THROWS(parse_entry(ByteSpan(whole).first(bytes)), ErrorKind::kInternal, "broken entry");
  }
  CHECK_EQ(parse_entry(whole).announcements.size(), 2u);
}

TEST(equal_requests_are_decided_in_one_round) {
  Agreement agreement = among(3);
  const Bytes a = entry({allreduce("a")});
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
  const Bytes again = entry({allreduce("a", {5})});
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
    const Bytes a = entry({barrier});
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
}  // namespace torch_ring
