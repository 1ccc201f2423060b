// SPDX-License-Identifier: Apache-2.0
#include "collective/grouped_reduction.h"

#include <array>
#include <cstddef>

#include "collective/plan.h"
#include "core/at.h"

namespace torch_ring {

void reduce_in_groups(std::span<void* const> outputs, std::span<const void* const> inputs,
                      std::span<const std::vector<int>> groups, std::size_t count,
                      const Reduction& reduction) {
  const auto inputs_of = [&](const std::vector<int>& group) {
    std::vector<const void*> members;
    for (const int index : group) members.push_back(at(inputs, index));
    return members;
  };
  if (groups.size() == 1) return reduce(outputs, inputs_of(groups.front()), count, reduction);

  const DType wide = accumulation_dtype(reduction);
  const std::size_t bytes = count * size_of(wide);
  std::vector<std::byte> partials(groups.size() * bytes);
  std::vector<const void*> by_group;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    std::byte* const partial = partials.data() + i * bytes;
    reduce_partial(partial, inputs_of(groups[i]), count, reduction);
    by_group.push_back(partial);
  }
  const std::array<void*, 1> sum{partials.data()};
  reduce_in_groups(sum, by_group, sections_of(static_cast<int>(groups.size())), count,
                   {wide, reduction.op, {}});
  finish_partial(outputs, sum.front(), count, reduction);
}

}  // namespace torch_ring
