#include "transport/kept_pages.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "harness.h"

using namespace torch_ring;

namespace {

constexpr std::size_t kHugePage = 2u << 20;
constexpr std::size_t kBytes = 4 * kHugePage;
constexpr std::size_t kMostBytes = 4 * kBytes;

void fill(KeptPages::Block block, int value) { std::memset(block.data, value, block.bytes); }

bool is_filled(KeptPages::Block block, int value) {
  const auto* const bytes = static_cast<const unsigned char*>(block.data);
  for (std::size_t i = 0; i < block.bytes; ++i) {
    if (bytes[i] != value) return false;
  }
  return true;
}

}  // namespace

TEST(kept_pages_are_there_for_the_next) {
  KeptPages pages(kMostBytes);
  const KeptPages::Block first = pages.take(kBytes);
  const KeptPages::Block second = pages.take(kBytes);
  CHECK(first.data != second.data);
  fill(first, 1);
  fill(second, 2);
  pages.give_back(first);
  CHECK_EQ(pages.kept_bytes(), kBytes);
  CHECK(is_filled(second, 2));
  const KeptPages::Block third = pages.take(kBytes);
  CHECK_EQ(third.data, first.data);
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});
  fill(third, 3);
  CHECK(is_filled(second, 2));
  pages.give_back(second);
  pages.give_back(third);
  CHECK_EQ(pages.take(kBytes).data, third.data);  // what was used last is in the caches
  CHECK_EQ(pages.take(kBytes).data, second.data);
}

TEST(kept_pages_are_whole_and_aligned) {
  KeptPages pages(kMostBytes);
  for (const std::size_t bytes : {std::size_t{1}, kHugePage, kHugePage + 1, kBytes - 1}) {
    const KeptPages::Block block = pages.take(bytes);
    CHECK(block.data != nullptr);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data) % kHugePage, std::size_t{0});
    CHECK_EQ(block.bytes, (bytes + kHugePage - 1) / kHugePage * kHugePage);
    fill(block, 7);
    pages.give_back(block);
  }
}

TEST(kept_pages_serve_what_needs_almost_as_many) {
  KeptPages pages(kMostBytes);
  const KeptPages::Block block = pages.take(5 * kHugePage);
  pages.give_back(block);
  const KeptPages::Block larger = pages.take(6 * kHugePage);
  const KeptPages::Block smaller = pages.take(3 * kHugePage);
  CHECK(larger.data != block.data);
  CHECK(smaller.data != block.data);
  const KeptPages::Block about = pages.take(4 * kHugePage);
  CHECK_EQ(about.data, block.data);
  CHECK_EQ(about.bytes, block.bytes);
  for (const KeptPages::Block taken : {larger, smaller, about}) pages.give_back(taken);
}

TEST(kept_pages_are_limited) {
  KeptPages pages(kMostBytes);
  pages.give_back(pages.take(kMostBytes + 1));
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});

  std::vector<KeptPages::Block> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(pages.take(kBytes));
  for (const KeptPages::Block block : blocks) pages.give_back(block);
  CHECK_EQ(pages.kept_bytes(), kMostBytes);
  for (int i = 5; i > 1; --i) CHECK_EQ(pages.take(kBytes).data, blocks[i].data);
  for (int i = 5; i > 1; --i) pages.give_back(blocks[i]);

  KeptPages many(1000 * kHugePage);
  std::vector<KeptPages::Block> small;
  for (int i = 0; i < 100; ++i) small.push_back(many.take(1));
  for (const KeptPages::Block block : small) many.give_back(block);
  CHECK(many.kept_bytes() < 100 * kHugePage);
}

TEST(kept_pages_fail_where_there_is_no_memory) {
  KeptPages pages(kMostBytes);
  CHECK(pages.take(SIZE_MAX).data == nullptr);
  CHECK(pages.take(SIZE_MAX / 4).data == nullptr);
}

TEST(kept_pages_of_several_threads_are_different) {
  KeptPages pages(kMostBytes);
  std::vector<std::thread> threads;
  for (int thread = 1; thread <= 4; ++thread) {
    threads.emplace_back([&pages, thread] {
      for (int i = 0; i < 20; ++i) {
        const KeptPages::Block block = pages.take(1);
        fill(block, thread);
        CHECK(is_filled(block, thread));
        pages.give_back(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(kept_pages_in_a_forked_child_are_its_own) {
  KeptPages pages(kMostBytes);
  const KeptPages::Block held = pages.take(kBytes);
  const KeptPages::Block kept = pages.take(kBytes);
  fill(held, 1);
  pages.give_back(kept);
  const pid_t child = ::fork();
  if (child == 0) {
    bool fine = is_filled(held, 1);
    pages.give_back(held);
    for (int i = 0; i < 2; ++i) fill(pages.take(kBytes), 2);
    ::_exit(fine ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(is_filled(held, 1));
  fill(held, 3);
  CHECK_EQ(pages.take(kBytes).data, kept.data);
}
