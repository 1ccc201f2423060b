// SPDX-License-Identifier: Apache-2.0
// The pools of pages and of blocks, and copies around the caches.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <vector>

#include "elements.h"
#include "forked.h"
#include "harness.h"
#include "memory/block_pool.h"
#include "memory/cache_lines.h"
#include "memory/huge_pages.h"
#include "memory/page_pool.h"

namespace torch_ring::test::pools_test {
namespace {

constexpr std::size_t kBytes = 4 * kHugePage;
constexpr std::size_t kMostBytes = 4 * kBytes;

void fill(void* block, int value) { std::memset(block, value, PagePool::bytes_of(block)); }

bool is_filled(const void* block, int value) {
  return test::is_filled(block, PagePool::bytes_of(block), value);
}

TEST(page_pool_reuses_returned_blocks) {
  PagePool pages(kMostBytes);
  void* const first = pages.take(kBytes);
  void* const second = pages.take(kBytes);
  CHECK(first != second);
  fill(first, 1);
  fill(second, 2);
  pages.give_back(first);
  CHECK_EQ(pages.kept_bytes(), kBytes);
  CHECK(is_filled(second, 2));
  CHECK_EQ(pages.take(kBytes), first);
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});
  fill(first, 3);
  CHECK(is_filled(second, 2));
  pages.give_back(second);
  pages.give_back(first);
  CHECK_EQ(pages.take(kBytes), first);  // the last used one, which is in the caches
  CHECK_EQ(pages.take(kBytes), second);
  for (void* const block : {first, second}) pages.give_back(block);
}

TEST(page_pool_reuses_blocks_of_up_to_a_quarter_more) {
  PagePool pages(kMostBytes);
  void* const larger = pages.take(5 * kHugePage);
  pages.give_back(larger);
  for (const std::size_t huge_pages : {1, 3, 6}) {
    void* const other = pages.take(huge_pages * kHugePage);
    CHECK(other != larger);
    pages.give_back(other);
  }
  CHECK_EQ(pages.take(4 * kHugePage), larger);
  CHECK_EQ(PagePool::bytes_of(larger), 5 * kHugePage);
  pages.give_back(larger);
}

TEST(page_pool_keeps_at_most_its_limit) {
  PagePool pages(kMostBytes);
  pages.give_back(pages.take(kMostBytes + 1));
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});

  std::vector<void*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(pages.take(kBytes));
  for (void* const block : blocks) pages.give_back(block);
  CHECK_EQ(pages.kept_bytes(), kMostBytes);
  for (int i = 5; i > 1; --i) CHECK_EQ(pages.take(kBytes), blocks[i]);
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});

  pages.limit(kBytes);
  for (int i = 5; i > 1; --i) pages.give_back(blocks[i]);
  CHECK_EQ(pages.kept_bytes(), kBytes);
  CHECK_EQ(pages.take(kBytes), blocks[2]);
  pages.give_back(blocks[2]);
  pages.limit(kBytes - 1);
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});
  pages.give_back(pages.take(kBytes));
  CHECK_EQ(pages.kept_bytes(), std::size_t{0});
}

TEST(page_pool_gives_several_threads_different_pages) {
  PagePool pages(kMostBytes);
  test::run_ranks(4, [&](int thread) {
    for (int i = 0; i < 20; ++i) {
      void* const block = pages.take(1);
      fill(block, thread);
      CHECK(is_filled(block, thread));
      pages.give_back(block);
    }
  });
}

TEST(page_pool_of_a_forked_child_is_independent) {
  PagePool pages(kMostBytes);
  void* const held = pages.take(kBytes);
  void* const kept = pages.take(kBytes);
  fill(held, 1);
  fill(kept, 1);
  pages.give_back(kept);
  CHECK(holds_in_child([&] {
    CHECK(is_filled(held, 1));
    pages.give_back(held);
    for (int i = 0; i < 2; ++i) {
      void* const block = pages.take(kBytes);
      fill(block, 2);
      CHECK(is_filled(block, 2));
    }
    return true;
  }));
  CHECK(is_filled(held, 1));
  CHECK_EQ(pages.take(kBytes), kept);
  for (void* const block : {held, kept}) pages.give_back(block);
}

/// An allocator that counts allocations and lists live blocks.
class Memory {
 public:
  std::shared_ptr<BlockPool> pool() {
    return BlockPool::make([this](std::size_t bytes) {
      if (exhausted) throw std::bad_alloc();
      void* const data = std::malloc(bytes);
      ++allocations;
      live.insert(data);
      return std::shared_ptr<void>(data, [this](void* freed) {
        live.erase(freed);
        std::free(freed);
      });
    });
  }

  int allocations = 0;
  bool exhausted = false;
  std::set<void*> live;
};

TEST(block_pool_reuses_a_returned_block) {
  Memory memory;
  const auto pool = memory.pool();
  pool->expect(kBytes);
  auto block = pool->take(kBytes);
  void* const data = block.get();
  CHECK_EQ(pool->vacant_bytes(), std::size_t{0});
  block.reset();
  CHECK_EQ(pool->vacant_bytes(), kBytes);
  CHECK_EQ(pool->take(kBytes).get(), data);
  CHECK_EQ(memory.allocations, 1);
}

TEST(block_pool_gives_at_most_twice_the_expected_blocks) {
  Memory memory;
  const auto pool = memory.pool();
  CHECK(pool->take(kBytes) == nullptr);
  pool->expect(kBytes);
  pool->expect(kBytes);
  CHECK(pool->take(kBytes - 1) == nullptr);
  std::set<std::shared_ptr<void>> taken;
  for (int i = 0; i < 4; ++i) taken.insert(pool->take(kBytes));
  CHECK(!taken.contains(nullptr));
  CHECK_EQ(taken.size(), 4u);
  CHECK(pool->take(kBytes) == nullptr);
  taken.clear();
  CHECK_EQ(memory.live.size(), 4u);
}

TEST(block_pool_frees_blocks_of_sizes_no_longer_expected) {
  Memory memory;
  const auto pool = memory.pool();
  pool->expect(kBytes);
  pool->expect(2 * kBytes);
  auto held = pool->take(kBytes);
  pool->take(kBytes).reset();
  pool->take(2 * kBytes).reset();
  CHECK_EQ(memory.live.size(), 3u);
  pool->expect_no_more(kBytes);
  CHECK_EQ(memory.live.size(), 2u);
  CHECK(pool->take(kBytes) == nullptr);
  held.reset();
  CHECK_EQ(memory.live.size(), 1u);
  CHECK(pool->take(2 * kBytes) != nullptr);
}

TEST(block_outlives_its_block_pool) {
  Memory memory;
  auto pool = memory.pool();
  pool->expect(kBytes);
  auto vacant = pool->take(kBytes);
  auto held = pool->take(kBytes);
  vacant.reset();
  pool.reset();
  CHECK_EQ(memory.live.size(), 1u);
  CHECK_EQ(*memory.live.begin(), held.get());
  held.reset();
  CHECK(memory.live.empty());
}

TEST(block_pool_returns_null_when_allocation_fails) {
  Memory memory;
  const auto pool = memory.pool();
  pool->expect(kBytes);
  memory.exhausted = true;
  CHECK(pool->take(kBytes) == nullptr);
  memory.exhausted = false;
  CHECK(pool->take(kBytes) != nullptr);
}

TEST(block_pool_gives_no_blocks_in_a_forked_child) {
  Memory memory;
  const auto pool = memory.pool();
  pool->expect(kBytes);
  pool->take(kBytes).reset();
  CHECK(holds_in_child([&] { return pool->take(kBytes) == nullptr; }));
}

TEST(copy_nontemporal_writes_exactly_its_target_range) {
  constexpr std::size_t kMost = 5 * kCacheLine;
  constexpr auto kUntouched = std::byte{0xee};
  std::vector<std::byte> source(kMost + kCacheLine);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 199);
  for (std::size_t offset = 0; offset <= kCacheLine; ++offset) {
    for (std::size_t bytes = 0; bytes <= kMost; bytes += bytes < 70 ? 1 : 13) {
      std::vector<std::byte> target(kMost + 2 * kCacheLine, kUntouched);
      const std::byte* const from = source.data() + (offset * 7) % kCacheLine;
      copy_nontemporal(target.data() + offset, from, bytes);
      const auto begin = target.begin() + static_cast<std::ptrdiff_t>(offset);
      const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
      const auto is_untouched = [&](std::byte byte) { return byte == kUntouched; };
      CHECK(std::equal(begin, end, from));
      CHECK(std::all_of(target.begin(), begin, is_untouched));
      CHECK(std::all_of(end, target.end(), is_untouched));
    }
  }
}

}  // namespace
}  // namespace torch_ring::test::pools_test
