// backward_name(), bucket_name(), in_words() and all_sent(): the messages of backward
// synchronisation.
//
// The ranks match operations by name. In one pass some ranks may take the fast path
// (DenseFinalizer) and others the slow one (BackwardSync in Python), so both take names from here.
// Users do not know these names: errors say in words what such an operation is for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torch_ring {

/// The name of the allgather of the ranks' reports. `number` counts the agreements of a process
/// set.
std::string backward_name(std::uint64_t number);

/// The number of the pass whose reports nobody waits for, if this is the name of their allgather.
std::optional<std::uint64_t> planned_pass(std::string_view name);

/// A gradient that the ranks ask those for that have joined: it was averaged before agreement
/// `number`, and they have it still.
struct KeptGradient {
  std::int64_t optimizer;
  std::int64_t number;
  std::int64_t parameter;
};

/// The gradient that an allreduce of this name asks for: "gradients.<optimizer>.<number>.kept.
/// <parameter>", in Python.
std::optional<KeptGradient> kept_gradient(std::string_view name);

/// The name of the allreduce of a bucket from element `begin` on. `optimizer` is its index on the
/// process set.
std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin);

/// What the operation of such a name is for: "averaging the gradients of backward pass 3". Nothing
/// for a name of another kind. Python adds to these names: ".weights" to that of an agreement,
/// ".ahead" if nobody waits for it; in
/// the place of the bucket "sparse.", a parameter and a number, "loss", or "kept"; to a bucket's,
/// what a compressor's rounds are called.
std::optional<std::string> in_words(std::string_view name);

/// Whether `gathered` is `own`, once or repeated: all ranks have sent the same bytes.
bool all_sent(std::string_view gathered, std::string_view own);

}  // namespace torch_ring
