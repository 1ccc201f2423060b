// SPDX-License-Identifier: Apache-2.0
// Engine: reduce, gather and scatter, inline and not; a fence; mismatches.
#include <numeric>

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

const bool kReduce = on_all_layouts("reduce to every root, inline and not", [](Rank& rank) {
  for (const std::size_t count : kCounts) {
    for (int root = 0; root < rank.size(); ++root) {
      const std::vector<float> input = rank.input(count);
      const std::vector<float> untouched(count, -1.0f);
      const bool at_root = rank.rank() == root;
      std::vector<float> output = untouched;
      run_now(rank, rooted(Collective::kReduce, count, root, input.data(), output.data()));
      CHECK(output == (at_root ? Rank::sums(count, rank.size()) : untouched));
      std::vector<float> in_place = input;
      run_now(rank, rooted(Collective::kReduce, count, root, in_place.data(),
                           at_root ? in_place.data() : nullptr));
      CHECK(in_place == (at_root ? Rank::sums(count, rank.size()) : input));
    }
  }
});

const bool kGather = on_all_layouts("gather to every root, inline and not", [](Rank& rank) {
  for (const std::size_t count : kCounts) {
    for (int root = 0; root < rank.size(); ++root) {
      const std::vector<float> input = rank.input(count);
      const std::vector<float> all = inputs_of_all(count, rank.size());
      const bool at_root = rank.rank() == root;
      std::vector<float> output(at_root ? all.size() : 0);
      run_now(rank, rooted(Collective::kGather, count, root, input.data(), output.data()));
      if (at_root) CHECK(output == all);
    }
  }
});

const bool kScatter = on_all_layouts("scatter from every root, inline and not", [](Rank& rank) {
  for (const std::size_t count : kCounts) {
    for (int root = 0; root < rank.size(); ++root) {
      const std::vector<float> all = inputs_of_all(count, rank.size());
      const bool at_root = rank.rank() == root;
      std::vector<float> output(count, -1.0f);
      run_now(rank, rooted(Collective::kScatter, count, root, at_root ? all.data() : nullptr,
                           output.data()));
      CHECK(output == rank.input(count));
    }
  }
});

const bool kManyAtOnce =
    on_all_layouts("collectives with a root and others in flight at once", [](Rank& rank) {
      constexpr int kMany = 30;
      std::vector<std::vector<float>> sums(kMany);
      std::vector<std::vector<float>> parts(kMany);
      std::vector<std::shared_ptr<Work>> works;
      const std::vector<float> input = rank.input(700);
      const std::vector<float> all = inputs_of_all(700, rank.size());
      for (int i = 0; i < kMany; ++i) {
        at(sums, i).assign(700, -1.0f);
        at(parts, i).assign(700, -1.0f);
        const int root = i % rank.size();
        const auto submit = [&](Request request) {
          works.push_back(rank.engine().submit(std::move(request), Engine::Mode::kAsynchronous));
        };
        submit(rooted(Collective::kReduce, 700, root, input.data(), at(sums, i).data()));
        submit(fence());
        submit(rooted(Collective::kScatter, 700, root, all.data(), at(parts, i).data()));
      }
      for (const auto& work : works) rank.wait(work);
      for (int i = 0; i < kMany; ++i) {
        CHECK(at(parts, i) == input);
        if (i % rank.size() == rank.rank()) CHECK(at(sums, i) == Rank::sums(700, rank.size()));
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

/// Checks that requests that differ on rank 1 fail on all ranks with both sides in the error, and
/// that the job goes on.
void check_mismatch(Rank& rank, Request request, const std::string& one, const std::string& other) {
  try {
    run_now(rank, std::move(request));
    fail(__FILE__, __LINE__, "no mismatch");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kMismatch);
    const std::string text = error.what();
    if (text.find("rank 0: " + one) == std::string::npos ||
        text.find("rank 1: " + other) == std::string::npos) {
      fail(__FILE__, __LINE__, text);
    }
  }
  std::vector<float> values = rank.input(5);
  rank.allreduce_now(values, "after");
  CHECK(values == Rank::sums(5, rank.size()));
}

const bool kMismatch = on_all_layouts(
    "ranks that disagree about the root, dtype, shape or collective",
    [](Rank& rank) {
      std::vector<float> input(10'000);
      std::vector<float> output(10'000 * static_cast<std::size_t>(rank.size()));
      const bool other = rank.rank() == 1;
      for (const std::size_t count : {3u, 9'000u}) {  // inline and not
        const std::string shape = " [" + std::to_string(count) + "]";
        for (const auto& [collective, sum] : {std::pair{Collective::kReduce, " Sum"},
                                              {Collective::kGather, ""},
                                              {Collective::kScatter, ""}}) {
          const std::string what = std::string(name_of(collective)) + " 'a' ";
          const void* const from =
              collective == Collective::kScatter ? output.data() : input.data();
          void* const to = collective == Collective::kScatter ? input.data() : output.data();
          const auto request = [&] { return rooted(collective, count, 0, from, to, "a"); };

          Request roots = request();
          roots.fingerprint.root = other ? 1 : 0;
          check_mismatch(rank, std::move(roots), what + "float32" + shape + sum + " root 0",
                         what + "float32" + shape + sum + " root 1");
          Request dtypes = request();
          if (other) dtypes.fingerprint.dtype = DType::kInt32;
          check_mismatch(rank, std::move(dtypes), what + "float32" + shape + sum + " root 0",
                         what + "int32" + shape + sum + " root 0");
          Request shapes = request();
          if (other) shapes.fingerprint.shape = {1, static_cast<std::int64_t>(count)};
          check_mismatch(rank, std::move(shapes), what + "float32" + shape,
                         what + "float32 [1, " + std::to_string(count) + "]");
        }
      }
    },
    2);

const bool kJoined = on_all_layouts(
    "a rank that has joined gives nothing to a gather",
    [](Rank& rank) {
      std::int64_t last = -1;
      const auto join = [&] {
        Request request;
        request.fingerprint.collective = Collective::kJoin;
        request.fingerprint.name = kJoinKey;
        request.output = &last;
        run_now(rank, std::move(request));
      };
      if (rank.rank() > 0) {
        std::vector<float> input(3);
        std::vector<float> output(3 * static_cast<std::size_t>(rank.size()));
        for (const auto collective :
             {Collective::kReduce, Collective::kGather, Collective::kScatter}) {
          CHECK_THROWS(run_now(rank, rooted(collective, 3, 1, output.data(), output.data(), "g")),
                       ErrorKind::kMismatch, "these have called join(): rank 0");
        }
      }
      join();
      CHECK(last >= 0);
    },
    2);

}  // namespace
}  // namespace torch_ring::test::rooted_test
