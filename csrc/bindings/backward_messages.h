// Names and bytes that the ranks exchange at the end of a backward pass.
//
// The ranks match operations by name, and some of them may take the fast path (DenseFinalizer) in a
// pass in which others take the slow one (BackwardSync in Python). So both ask here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_ring {

/// The allgather of the ranks' reports. `number` counts the agreements of a process set.
std::string backward_name(std::uint64_t number);

/// The allreduce of a bucket of an optimizer (its index on the process set), from element `begin`.
std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin);

/// Whether `gathered` is `own` once or several times: all ranks have sent the same.
bool all_sent(std::string_view gathered, std::string_view own);

}  // namespace torch_ring
