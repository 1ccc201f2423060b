// SPDX-License-Identifier: Apache-2.0
// at(): a list's element at an int index.
#pragma once

#include <cassert>
#include <cstddef>
#include <iterator>
#include <utility>

namespace torch_ring {

/// list[index]; `index` is an int: a rank, a host, a step. Builds without NDEBUG check that it is
/// within the list.
template <class List>
constexpr decltype(auto) at(List&& list, int index) {
  assert(index >= 0 && static_cast<std::size_t>(index) < std::size(list));
  return std::forward<List>(list)[static_cast<std::size_t>(index)];
}

}  // namespace torch_ring
