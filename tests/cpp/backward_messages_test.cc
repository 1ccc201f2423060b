// SPDX-License-Identifier: Apache-2.0
// The names of backward synchronisation, and their wording in errors.
#include "engine/request.h"
#include "harness.h"

namespace torch_ring::test::backward_messages_test {
namespace {

std::string words(const std::string& name) { return in_words(name).value_or("(none)"); }

TEST(names_of_gradients_in_words) {
  CHECK_EQ(words(backward_name(2)), "averaging the gradients of backward pass 3");
  CHECK_EQ(words(backward_name(2) + ".weights"), "comparing the ranks' weights in backward pass 3");
  CHECK_EQ(words(backward_name(2) + ".ahead"), "comparing backward pass 3 with the other ranks");
  const std::string bucket = "averaging the gradients of backward pass 18 (optimizer 1, bucket 3)";
  CHECK_EQ(words(bucket_name(1, 17, 3, 64)), bucket);
  CHECK_EQ(words(bucket_name(1, 17, 3, 64) + ".0.header"), bucket);
  CHECK_EQ(words("gradients.0.17.sparse.words.weight.1"),
           "averaging the sparse gradient of 'words.weight' of backward pass 18");
  CHECK_EQ(words("gradients.0.17.loss"), "averaging the closure's loss after backward pass 17");
  CHECK_EQ(in_words("gradients.1.17.carried.head.weight").value_or(""),
           "averaging once more what 'head.weight' had before backward pass 18");
}

TEST(kinds_of_gradients_in_words) {
  const auto kind = [](const std::string& name) { return kind_in_words(name).value_or("(none)"); };
  CHECK_EQ(kind(backward_name(2)), "agreeing on gradients");
  CHECK_EQ(kind(backward_name(2) + ".weights"), "comparing weights");
  CHECK_EQ(kind(bucket_name(1, 17, 3, 64)), "averaging gradients");
  CHECK_EQ(kind("gradients.0.17.loss"), "averaging the closure's loss");
  CHECK_EQ(kind("gradients.0.17.carried.head.loss"), "averaging gradients");
  CHECK_EQ(kind("loss"), "(none)");
}

TEST(other_names_stay) {
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
  fingerprint.name = backward_name(0);
  CHECK_EQ(fingerprint.describe(), "averaging the gradients of backward pass 1");
  fingerprint.name = "mine";
  CHECK_EQ(fingerprint.describe(), "allgather 'mine' float32 [*, 4]");
}

}  // namespace
}  // namespace torch_ring::test::backward_messages_test
