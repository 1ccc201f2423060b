// Looks: what the answers of a late rank are summed up to.
#include "control/looks.h"

#include "harness.h"

namespace torch_ring::test {
namespace {

using std::chrono::milliseconds;

constexpr Clock::time_point kBegin{};
constexpr milliseconds kWait{200};

TEST(looks_are_summed_up_by_what_was_found_most_often) {
  Looks looks;
  CHECK_EQ(looks.describe(3, kWait), "");
  const char* const answers[] = {"asleep\nin f", "computing\nin g", "asleep\nin h", "asleep"};
  for (std::uint64_t i = 0; i < 4; ++i) {
    looks.begin(i + 1, 3, kBegin);
    CHECK(looks.learn(i + 1, 3, answers[i], kBegin));
    looks.end(i + 1, kBegin);  // answered already
  }
  CHECK_EQ(looks.describe(3, kWait),
           "asleep in 3 of 4 looks, or 150 ms, computing in 1, or 50 ms (at last in g)");
  CHECK_EQ(looks.describe(2, kWait), "");
}

TEST(looks_say_what_the_rank_had_most_often_not_come_to) {
  Looks looks;
  const char* const answers[] = {"asleep\nin f\nbucket 1", "asleep\nin f\nbucket 0", "asleep\nin f",
                                 "computing\n\nbucket 1"};
  for (std::uint64_t i = 0; i < 4; ++i) {
    looks.begin(i + 1, 3, kBegin);
    looks.learn(i + 1, 3, answers[i], kBegin);
  }
  CHECK_EQ(
      looks.describe(3, kWait),
      "asleep in 3 of 4 looks, or 150 ms (at last in f), computing in 1, or 50 ms; in 2 of them "
      "before bucket 1");
}

TEST(looks_answered_after_the_wait_are_not_answered) {
  Looks looks;
  looks.begin(7, 1, kBegin);
  looks.end(7, kBegin + Looks::kPrompt + milliseconds(1));
  CHECK(looks.learn(7, 1, "computing\nin f", kBegin));  // it was a look, but too late
  CHECK_EQ(looks.describe(1, kWait), "not answering in 1 of 1 looks, or 200 ms");
  CHECK(!looks.learn(7, 1, "computing\nin f", kBegin));   // answered twice: not ours
  CHECK(!looks.learn(8, 1, "in no collective", kBegin));  // of another kind of question
}

TEST(looks_of_waits_that_end_at_once_tell_nothing) {
  Looks looks;
  looks.begin(1, 1, kBegin);
  looks.end(1, kBegin + Looks::kPrompt);
  CHECK_EQ(looks.describe(1, kWait), "");
  CHECK(looks.learn(1, 1, "computing", kBegin + Looks::kPrompt));
  CHECK_EQ(looks.describe(1, kWait), "");
}

TEST(looks_whose_answer_took_long_are_not_answered) {
  Looks looks;
  for (const std::uint64_t number : {1u, 2u}) looks.begin(number, 1, kBegin);
  CHECK(looks.learn(1, 1, "asleep\nin f", kBegin + Looks::kPatience));
  CHECK(looks.learn(2, 1, "asleep\nin f", kBegin + 2 * Looks::kPatience));
  CHECK_EQ(looks.describe(1, kWait),
           "asleep in 1 of 2 looks, or 100 ms (at last in f), not answering in 1, or 100 ms");
}

TEST(looks_believe_only_the_rank_that_was_asked_and_three_lines_of_it) {
  Looks looks;
  looks.begin(1, 1, kBegin);
  CHECK(looks.learn(1, 2, "asleep", kBegin));  // another rank
  CHECK_EQ(looks.describe(1, kWait), "");
  CHECK(looks.learn(1, 1, "", kBegin));  // it has nothing to say
  CHECK_EQ(looks.describe(1, kWait), "");
  looks.begin(2, 1, kBegin);
  CHECK(looks.learn(
      2, 1, "asleep\n" + std::string(4000, 'x') + "\n" + std::string(4000, 'y') + "\nand more",
      kBegin));
  CHECK_EQ(looks.describe(1, kWait), "asleep in 1 of 1 looks, or 200 ms (at last " +
                                         std::string(300, 'x') + "); in 1 of them before " +
                                         std::string(300, 'y'));
}

TEST(looks_forget_the_oldest) {
  Looks looks;
  for (std::uint64_t number = 1; number <= Looks::kMost + 20; ++number) {
    looks.begin(number, 0, kBegin);
    looks.learn(number, 0, number <= 20 ? "asleep" : "computing", kBegin);
  }
  CHECK_EQ(looks.describe(0, kWait), "computing in 100 of 100 looks, or 200 ms");
  for (std::uint64_t number = 1000; number < 3000; ++number)
    looks.begin(number, 0, kBegin);  // lost ranks
  CHECK(!looks.learn(1000, 0, "asleep", kBegin));
  CHECK(looks.learn(2999, 0, "asleep", kBegin));
}

}  // namespace
}  // namespace torch_ring::test
