// SPDX-License-Identifier: Apache-2.0
// map_at_huge_page() and make_huge_pages(): pages of 2 MiB, where the system has them.
#pragma once

#include <cstddef>

namespace torch_ring {

inline constexpr std::size_t kHugePage = 2u << 20;  // of x86-64, and of arm64 with 4 KiB pages

constexpr std::size_t huge_page_floor(std::size_t bytes) { return bytes / kHugePage * kHugePage; }
constexpr std::size_t huge_page_ceil(std::size_t bytes) {
  return huge_page_floor(bytes + kHugePage - 1);
}

/// Maps `bytes` of private memory that begin at a huge page, and `ahead` bytes before them. Both
/// are whole pages. Returns the start of the huge page, or null if there is no memory.
std::byte* map_at_huge_page(std::size_t bytes, std::size_t ahead, int protection) noexcept;

/// Replaces small pages by huge ones and keeps their contents; the system never does this to shared
/// memory by itself. Every huge page needs one committed small page. Pages that are in use at the
/// moment stay small. Returns false if the system has no huge pages, or no more.
bool make_huge_pages(std::byte* begin, std::size_t bytes) noexcept;

}  // namespace torch_ring
