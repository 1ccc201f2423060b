// SPDX-License-Identifier: Apache-2.0
#include "memory/block_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <set>

#include "harness.h"

namespace torch_ring::test::block_pool_test {

namespace {

constexpr std::size_t kBytes = 4096;

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

}  // namespace

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
  const pid_t child = ::fork();
  if (child == 0) ::_exit(pool->take(kBytes) == nullptr ? 0 : 1);
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace torch_ring::test::block_pool_test
