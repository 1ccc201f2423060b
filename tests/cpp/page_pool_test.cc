// SPDX-License-Identifier: Apache-2.0
#include "memory/page_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "harness.h"
#include "memory/huge_pages.h"

namespace torch_ring::test::page_pool_test {

namespace {

constexpr std::size_t kBytes = 4 * kHugePage;
constexpr std::size_t kMostBytes = 4 * kBytes;

void fill(void* block, int value) { std::memset(block, value, PagePool::bytes_of(block)); }

bool is_filled(const void* block, int value) {
  return test::is_filled(block, PagePool::bytes_of(block), value);
}

}  // namespace

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

TEST(page_pool_blocks_are_aligned_whole_huge_pages) {
  PagePool pages(kMostBytes);
  for (const std::size_t bytes : {std::size_t{1}, kHugePage, kHugePage + 1, kBytes - 1}) {
    void* const block = pages.take(bytes);
    CHECK(block != nullptr);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block) % kHugePage, std::size_t{0});
    CHECK_EQ(PagePool::bytes_of(block), huge_page_ceil(bytes));
    fill(block, 7);
    pages.give_back(block);
  }
}

TEST(page_pool_reuses_blocks_of_up_to_a_quarter_more) {
  PagePool pages(kMostBytes);
  void* const larger = pages.take(5 * kHugePage);
  void* const exact = pages.take(4 * kHugePage);
  pages.give_back(exact);
  pages.give_back(larger);
  CHECK_EQ(pages.take(4 * kHugePage), exact);  // the smallest that fits
  CHECK_EQ(pages.take(4 * kHugePage), larger);
  CHECK_EQ(PagePool::bytes_of(larger), 5 * kHugePage);
  pages.give_back(larger);
  for (const std::size_t huge_pages : {1, 3, 6}) {
    void* const other = pages.take(huge_pages * kHugePage);
    CHECK(other != larger);
    pages.give_back(other);
  }
  pages.give_back(exact);
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

TEST(page_pool_returns_null_without_memory) {
  PagePool pages(kMostBytes);
  CHECK(pages.take(SIZE_MAX) == nullptr);
  CHECK(pages.take(SIZE_MAX - 2 * kHugePage) == nullptr);
  CHECK(pages.take(SIZE_MAX / 4) == nullptr);
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

/// Forks. Returns whether both checks hold: in_child(), and in_parent() while the child lives.
template <class Child, class Parent>
bool with_child(Child&& in_child, Parent&& in_parent) {
  int done[2];
  if (::pipe(done) != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    const bool passed = in_child();
    ::close(done[1]);
    ::_exit(::read(done[0], &byte, 1) == 0 && passed ? 0 : 1);  // the parent has closed it
  }
  ::close(done[0]);
  const bool passed = in_parent();
  ::close(done[1]);
  int status = 1;
  ::waitpid(child, &status, 0);
  return passed && status == 0;
}

TEST(page_pool_of_a_forked_child_is_independent) {
  PagePool pages(kMostBytes);
  void* const held = pages.take(kBytes);
  void* const kept = pages.take(kBytes);
  fill(held, 1);
  fill(kept, 1);
  pages.give_back(kept);
  const auto in_child = [&] {
    bool passed = is_filled(held, 1);
    pages.give_back(held);
    for (int i = 0; i < 2; ++i) {
      void* const block = pages.take(kBytes);
      fill(block, 2);
      passed = passed && is_filled(block, 2);
    }
    return passed;
  };
  CHECK(with_child(in_child, [&] { return is_filled(held, 1); }));
  CHECK(is_filled(held, 1));
  CHECK_EQ(pages.take(kBytes), kept);
  for (void* const block : {held, kept}) pages.give_back(block);
}

#ifndef TORCH_RING_SANITIZED  // a sanitizer's own memory is copied for the child
static long faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

TEST(page_pool_kept_pages_are_not_copied_on_write_after_fork) {
  PagePool pages(kMostBytes);
  void* const block = pages.take(kBytes);
  fill(block, 1);
  pages.give_back(block);
  const auto in_parent = [&] {
    const long before = faults();
    fill(pages.take(kBytes), 2);
    return faults() - before < 100;  // a copy would fault for every 4 KiB
  };
  CHECK(with_child([] { return true; }, in_parent));
  pages.give_back(block);
}
#endif

}  // namespace torch_ring::test::page_pool_test
