// Huge pages: pages of 2 MiB, where the system has them.
#pragma once

#include <cstddef>

namespace torch_ring {

inline constexpr std::size_t kHugePage = 2u << 20;  // of x86-64, and of arm64 with 4 KiB pages

constexpr std::size_t huge_page_floor(std::size_t bytes) { return bytes / kHugePage * kHugePage; }
constexpr std::size_t huge_page_ceil(std::size_t bytes) {
  return huge_page_floor(bytes + kHugePage - 1);
}

/// Maps `bytes` of private memory where a huge page begins, and `ahead` bytes before them; both are
/// whole pages. Returns where the huge page begins, or null where there is no memory.
std::byte* map_at_huge_page(std::size_t bytes, std::size_t ahead, int protection) noexcept;

/// Puts huge pages in the place of small ones. Shared memory gets none of the system's own accord.
/// It has to have a small one in each; the contents stay. What somebody holds for a moment stays
/// small. False where the system has no huge pages, or no more.
bool make_huge_pages(std::byte* begin, std::size_t bytes) noexcept;

}  // namespace torch_ring
