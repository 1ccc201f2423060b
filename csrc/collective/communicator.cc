#include "collective/communicator.h"

namespace torch_ring {

void Communicator::reduce_inputs(std::span<const void* const> inputs, void* output,
                                 std::size_t count, const Reduction& reduction) const {
  reduce({&output, 1}, inputs, count, reduction);
}

}  // namespace torch_ring
