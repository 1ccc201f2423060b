// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

namespace torch_ring {

std::byte* map_at_huge_page(std::size_t bytes, std::size_t ahead, int protection) noexcept {
  // Map more than needed, to find a huge page's start in it; unmap the rest.
  const std::size_t mapped = ahead + bytes + kHugePage;
  if (mapped < bytes) return nullptr;
  void* const memory = ::mmap(nullptr, mapped, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(memory);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  std::byte* const data = begin + (huge_page_ceil(address + ahead) - address);
  const auto before = static_cast<std::size_t>(data - ahead - begin);
  if (before > 0) ::munmap(begin, before);
  ::munmap(data + bytes, kHugePage - before);
  return data;
}

bool make_huge_pages(std::byte* begin, std::size_t bytes) noexcept {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack; Linux 6.1
  if (::madvise(begin, bytes, kCollapse) == 0) return true;
  if (errno == EAGAIN && ::madvise(begin, bytes, kCollapse) == 0) return true;
  return errno != EINVAL && errno != ENOMEM;
}

}  // namespace torch_ring
