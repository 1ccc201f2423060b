// at(): an element by its rank.
#pragma once

#include <cassert>
#include <cstddef>
#include <iterator>
#include <utility>

namespace torch_ring {

/// list[index], where `index` is an int: a rank, a host, a step. 0 <= index < size of the list,
/// which builds without NDEBUG check.
template <class List>
constexpr decltype(auto) at(List&& list, int index) {
  assert(index >= 0 && static_cast<std::size_t>(index) < std::size(list));
  return std::forward<List>(list)[static_cast<std::size_t>(index)];
}

}  // namespace torch_ring
