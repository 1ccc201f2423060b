// SPDX-License-Identifier: Apache-2.0
#include "collective/communicator.h"

#include <vector>

#include "core/at.h"

namespace torch_ring {

void Communicator::gather(const void* input, void* output, std::span<const std::size_t> bytes,
                          int root) {
  std::vector<std::size_t> parts(bytes.size() * bytes.size(), 0);
  for (int peer = 0; peer < size(); ++peer) at(parts, peer * size() + root) = at(bytes, peer);
  alltoall(input, output, parts);
}

void Communicator::scatter(const void* input, void* output, std::span<const std::size_t> bytes,
                           int root) {
  std::vector<std::size_t> parts(bytes.size() * bytes.size(), 0);
  for (int peer = 0; peer < size(); ++peer) at(parts, root * size() + peer) = at(bytes, peer);
  alltoall(input, output, parts);
}

void Communicator::reduce_inputs(std::span<const void* const> inputs, void* output,
                                 std::size_t count, const Reduction& reduction) const {
  reduce({&output, 1}, inputs, count, reduction);
}

}  // namespace torch_ring
