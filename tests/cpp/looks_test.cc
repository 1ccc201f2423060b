// Looks: what the answers of a late rank are summed up to.
#include "control/looks.h"

#include "harness.h"

namespace torch_ring::test {
namespace {

TEST(looks_are_summed_up_by_what_was_found_most_often) {
  Looks looks;
  CHECK_EQ(looks.describe(3), "");
  const char* const answers[] = {"asleep\nin f", "computing\nin g", "asleep\nin h", "asleep"};
  for (std::uint64_t i = 0; i < 4; ++i) {
    looks.begin(i + 1, 3);
    CHECK(looks.learn(i + 1, answers[i]));
    looks.end(i + 1);  // answered already
  }
  CHECK_EQ(looks.describe(3), "asleep in 3 of 4 looks, computing in 1 (at last in g)");
  CHECK_EQ(looks.describe(2), "");
}

TEST(looks_answered_after_the_wait_are_not_answered) {
  Looks looks;
  looks.begin(7, 1);
  looks.end(7);
  CHECK(looks.learn(7, "computing\nin f"));  // it was a look, but too late
  CHECK_EQ(looks.describe(1), "not answering in 1 of 1 looks");
  CHECK(!looks.learn(7, "computing\nin f"));   // answered twice: not ours
  CHECK(!looks.learn(8, "in no collective"));  // of another kind of question
}

TEST(looks_forget_the_oldest) {
  Looks looks;
  for (std::uint64_t number = 1; number <= Looks::kMost + 20; ++number) {
    looks.begin(number, 0);
    looks.learn(number, number <= 20 ? "asleep" : "computing");
  }
  CHECK_EQ(looks.describe(0), "computing in 100 of 100 looks");
  for (std::uint64_t number = 1000; number < 3000; ++number) looks.begin(number, 0);  // lost ranks
  CHECK(!looks.learn(1000, "asleep"));
  CHECK(looks.learn(2999, "asleep"));
}

}  // namespace
}  // namespace torch_ring::test
