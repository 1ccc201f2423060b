// SPDX-License-Identifier: Apache-2.0
// Engine: reduce, gather and scatter, inline and not; a fence; mismatches.

#include "core/at.h"
#include "engine/request.h"
#include "engine_ranks.h"

namespace torch_ring::test::rooted_test {
namespace {

/// A request of a collective with a root, of `count` float32 a part.
Request rooted(Collective collective, std::size_t count, int root, const void* input, void* output,
               const std::string& name = "") {
  Request request;
  request.fingerprint.collective = collective;
  request.fingerprint.shape = {static_cast<std::int64_t>(count)};
  request.fingerprint.root = root;
  request.fingerprint.name = name;
  request.input = input;
  request.output = output;
  return request;
}

void run_now(Rank& rank, Request request) { rank.engine().submit_and_wait(std::move(request), {}); }

Request fence(const std::string& name = "") {
  Request request;
  request.fingerprint.collective = Collective::kFence;
  request.fingerprint.name = name;
  return request;
}

// Inline, short, and longer than segments and chunks.
constexpr std::size_t kCounts[] = {0, 1, 2, 501, 9'001, 150'001};

/// The inputs of all ranks, one after the other: see Rank::input().
std::vector<float> inputs_of_all(std::size_t count, int size) {
  std::vector<float> all;
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      all.push_back(static_cast<float>(i) * static_cast<float>(size) + static_cast<float>(rank));
    }
  }
  return all;
}

const bool kEveryRoot = on_all_layouts("collectives of every root, inline and not", [](Rank& rank) {
  for (const std::size_t count : kCounts) {
    const std::vector<float> input = rank.input(count);
    const std::vector<float> all = inputs_of_all(count, rank.size());
    const std::vector<float> sums = Rank::sums(count, rank.size());
    for (int root = 0; root < rank.size(); ++root) {
      const bool at_root = rank.rank() == root;
      std::vector<float> sum(count, -1.0f);
      const std::vector<float> untouched = sum;
      run_now(rank, rooted(Collective::kReduce, count, root, input.data(), sum.data()));
      CHECK(sum == (at_root ? sums : untouched));
      std::vector<float> in_place = input;
      run_now(rank, rooted(Collective::kReduce, count, root, in_place.data(),
                           at_root ? in_place.data() : nullptr));
      CHECK(in_place == (at_root ? sums : input));
      std::vector<float> gathered(at_root ? all.size() : 0);
      run_now(rank, rooted(Collective::kGather, count, root, input.data(), gathered.data()));
      if (at_root) CHECK(gathered == all);
      std::vector<float> part(count, -1.0f);
      run_now(rank, rooted(Collective::kScatter, count, root, at_root ? all.data() : nullptr,
                           part.data()));
      CHECK(part == input);
    }
  }
});

const bool kFence =
    on_all_layouts("a fence waits for all, and the numbering goes on", [](Rank& rank) {
      // After a barrier the numbers begin anew, so a request in flight could have a later one's
      // number.
      std::vector<float> first = rank.input(3);
      std::vector<float> second = rank.input(5);
      const auto before = rank.allreduce(first, "");
      const auto fenced = rank.engine().submit(fence(), Engine::Mode::kAsynchronous);
      const auto after = rank.allreduce(second, "");
      rank.wait(fenced);
      rank.wait(after);
      rank.wait(before);
      CHECK_EQ(before->request().fingerprint.name, "#1");
      CHECK_EQ(fenced->request().fingerprint.name, "#2");
      CHECK_EQ(after->request().fingerprint.name, "#3");
      CHECK(second == Rank::sums(5, rank.size()));
      run_now(rank, fence("named"));
      std::vector<float> third = rank.input(1);
      const auto last = rank.allreduce(third, "");
      rank.wait(last);
      CHECK_EQ(last->request().fingerprint.name, "#4");
    });

const bool kMismatch = on_all_layouts(
    "ranks that disagree about the root are told both, and life goes on",
    [](Rank& rank) {
      std::vector<float> memory(9'000 * static_cast<std::size_t>(rank.size()));
      for (const std::size_t count : {3u, 9'000u}) {  // inline and not
        for (const auto collective :
             {Collective::kReduce, Collective::kGather, Collective::kScatter}) {
          const int root = rank.rank() == 1 ? 1 : 0;
          CHECK_THROWS(
              run_now(rank, rooted(collective, count, root, memory.data(), memory.data(), "a")),
              ErrorKind::kMismatch, "root 1");
          std::vector<float> values = rank.input(5);
          rank.allreduce_now(values, "after");
          CHECK(values == Rank::sums(5, rank.size()));
        }
      }
    },
    2);

}  // namespace
}  // namespace torch_ring::test::rooted_test
