#include "memory/block_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <set>

#include "harness.h"

using namespace torch_ring;

namespace {

constexpr std::size_t kBytes = 4096;

/// Allocates, and knows what has not been freed.
class Memory {
 public:
  std::shared_ptr<BlockCache> cache() {
    return BlockCache::make([this](std::size_t bytes) {
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

TEST(block_cache_gives_the_same_block_again) {
  Memory memory;
  const auto cache = memory.cache();
  cache->expect(kBytes);
  auto block = cache->take(kBytes);
  void* const data = block.get();
  block.reset();
  CHECK_EQ(cache->take(kBytes).get(), data);
  CHECK_EQ(memory.allocations, 1);
}

TEST(block_cache_has_blocks_for_twice_what_is_expected) {
  Memory memory;
  const auto cache = memory.cache();
  CHECK(cache->take(kBytes) == nullptr);
  cache->expect(kBytes);
  cache->expect(kBytes);
  CHECK(cache->take(kBytes - 1) == nullptr);
  std::set<std::shared_ptr<void>> taken;
  for (int i = 0; i < 4; ++i) taken.insert(cache->take(kBytes));
  CHECK(!taken.contains(nullptr));
  CHECK_EQ(taken.size(), 4u);
  CHECK(cache->take(kBytes) == nullptr);
  taken.clear();
  CHECK_EQ(memory.live.size(), 4u);
}

TEST(block_cache_frees_what_is_expected_no_more) {
  Memory memory;
  const auto cache = memory.cache();
  cache->expect(kBytes);
  cache->expect(2 * kBytes);
  auto held = cache->take(kBytes);
  cache->take(kBytes).reset();
  cache->take(2 * kBytes).reset();
  CHECK_EQ(memory.live.size(), 3u);
  cache->expect_no_more(kBytes);
  CHECK_EQ(memory.live.size(), 2u);
  CHECK(cache->take(kBytes) == nullptr);
  held.reset();
  CHECK_EQ(memory.live.size(), 1u);
  CHECK(cache->take(2 * kBytes) != nullptr);
}

TEST(block_cache_block_outlives_the_cache) {
  Memory memory;
  auto cache = memory.cache();
  cache->expect(kBytes);
  auto vacant = cache->take(kBytes);
  auto held = cache->take(kBytes);
  vacant.reset();
  cache.reset();
  CHECK_EQ(memory.live.size(), 1u);
  CHECK_EQ(*memory.live.begin(), held.get());
  held.reset();
  CHECK(memory.live.empty());
}

TEST(block_cache_gives_nothing_when_memory_is_used_up) {
  Memory memory;
  const auto cache = memory.cache();
  cache->expect(kBytes);
  memory.exhausted = true;
  CHECK(cache->take(kBytes) == nullptr);
  memory.exhausted = false;
  CHECK(cache->take(kBytes) != nullptr);
}

TEST(block_cache_is_empty_in_a_child) {
  Memory memory;
  const auto cache = memory.cache();
  cache->expect(kBytes);
  cache->take(kBytes).reset();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(cache->take(kBytes) == nullptr ? 0 : 1);
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}
