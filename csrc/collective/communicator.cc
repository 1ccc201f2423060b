#include "collective/communicator.h"

#include "collective/adasum.h"

namespace torch_ring {

void Communicator::reduce_inputs(std::span<const void* const> inputs, void* output,
                                 std::size_t count, const Reduction& reduction) const {
  reduce({&output, 1}, inputs, count, reduction);
}

void Communicator::adasum(void* data, std::span<const std::size_t> counts, DType dtype) {
  torch_ring::adasum(*this, data, counts, dtype);
}

}  // namespace torch_ring
