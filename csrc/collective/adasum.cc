#include "collective/adasum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "collective/plan.h"
#include "core/at.h"
#include "core/error.h"

namespace torch_ring {

namespace {

/// The dot products of two tensors a and b, of a part of them or summed over parts.
struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;

  template <class T>
  static Dots of(const T* a, const T* b, std::size_t count) {
    Dots dots;
    for (std::size_t i = 0; i < count; ++i) {
      const double x = a[i];
      const double y = b[i];
      dots.ab += x * y;
      dots.aa += x * x;
      dots.bb += y * y;
    }
    return dots;
  }

  void operator+=(const Dots& other) {
    ab += other.ab;
    aa += other.aa;
    bb += other.bb;
  }

  double factor_of_a() const { return aa == 0 ? 1 : 1 - ab / (2 * aa); }
  double factor_of_b() const { return bb == 0 ? 1 : 1 - ab / (2 * bb); }
};

/// The dot products of every tensor, summed in the order of ranks over the ranks that hold parts of
/// the same two vectors: those that differ in the lowest `bits` bits of their rank only.
std::vector<Dots> summed(Communicator& communicator, const std::vector<Dots>& own, int bits) {
  const auto size = static_cast<std::size_t>(communicator.size());
  std::vector<Dots> all(own.size() * size);
  const std::vector<std::size_t> bytes(size, own.size() * sizeof(Dots));
  communicator.allgather(own.data(), all.data(), bytes);
  const auto first = static_cast<std::size_t>(communicator.rank() >> bits << bits);
  std::vector<Dots> sums(own.size());
  for (std::size_t rank = first; rank < first + (std::size_t{1} << bits); ++rank) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += all[rank * own.size() + i];
  }
  return sums;
}

/// Swaps halves with the partner of this level: sends the half that the partner keeps, and receives
/// the partner's values of the half that this rank keeps.
template <class T>
void swap_halves(Communicator& communicator, const T* data, T* received, std::size_t count,
                 int level) {
  const int size = communicator.size();
  const int bit = 1 << level;
  std::vector<std::size_t> bytes(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    at(bytes, rank * size + (rank ^ bit)) =
        adasum_range(count, rank ^ bit, level + 1).count * sizeof(T);
  }
  const Range given = adasum_range(count, communicator.rank() ^ bit, level + 1);
  communicator.alltoall(data + given.begin, received, bytes);
}

/// Gathers the parts of all ranks on every rank. `scratch` has `count` elements.
template <class T>
void gather(Communicator& communicator, T* data, T* scratch, std::size_t count, int levels) {
  std::vector<std::size_t> bytes;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    bytes.push_back(adasum_range(count, rank, levels).count * sizeof(T));
  }
  const Range own = adasum_range(count, communicator.rank(), levels);
  communicator.allgather(data + own.begin, scratch, bytes);
  const T* at = scratch;  // in the order of ranks
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const Range range = adasum_range(count, rank, levels);
    std::copy_n(at, range.count, data + range.begin);
    at += range.count;
  }
}

template <class T>
void adasum_in(Communicator& communicator, T* data, std::span<const std::size_t> counts) {
  const std::vector<Range> tensors = ranges_of(counts);
  const std::size_t count = tensors.empty() ? 0 : tensors.back().begin + tensors.back().count;
  const int levels = std::countr_zero(static_cast<unsigned>(communicator.size()));
  const auto scratch = std::make_unique_for_overwrite<T[]>(count);
  T* const received = scratch.get();
  for (int level = 0; level < levels; ++level) {
    swap_halves(communicator, data, received, count, level);
    const Range kept = adasum_range(count, communicator.rank(), level + 1);
    const bool has_a = (communicator.rank() >> level & 1) == 0;

    std::vector<Dots> dots;
    for (const Range tensor : tensors) {
      const Range part = overlap(tensor, kept);
      const T* const mine = data + part.begin;
      const T* const theirs = received + (part.begin - kept.begin);
      dots.push_back(part.count == 0 ? Dots{}
                     : has_a         ? Dots::of(mine, theirs, part.count)
                                     : Dots::of(theirs, mine, part.count));
    }
    dots = summed(communicator, dots, level + 1);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Range part = overlap(tensors[i], kept);
      const double a = dots[i].factor_of_a();
      const double b = dots[i].factor_of_b();
      const T own = static_cast<T>(has_a ? a : b);
      const T other = static_cast<T>(has_a ? b : a);
      for (std::size_t j = part.begin; j < part.begin + part.count; ++j) {
        data[j] = own * data[j] + other * received[j - kept.begin];
      }
    }
  }
  gather(communicator, data, scratch.get(), count, levels);
}

}  // namespace

Range adasum_range(std::size_t count, int rank, int halvings) {
  Range range{0, count};
  for (int level = 0; level < halvings; ++level) {
    const std::size_t lower = range.count - range.count / 2;
    const bool keeps_lower = (rank >> level & 1) == 0;
    range =
        keeps_lower ? Range{range.begin, lower} : Range{range.begin + lower, range.count - lower};
  }
  return range;
}

void adasum(Communicator& communicator, void* data, std::span<const std::size_t> counts,
            DType dtype) {
  const DType wide = accumulation_dtype({dtype, ReduceOp::kSum, {}});
  if (!std::has_single_bit(static_cast<unsigned>(communicator.size())) ||
      (wide != DType::kFloat32 && wide != DType::kFloat64)) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string("Adasum needs floating point and a power of two of ranks, not ") +
                    name_of(dtype) + " and " + std::to_string(communicator.size()));
  }
  if (communicator.size() == 1) return;
  if (dtype == DType::kFloat32) return adasum_in(communicator, static_cast<float*>(data), counts);
  if (dtype == DType::kFloat64) return adasum_in(communicator, static_cast<double*>(data), counts);

  std::size_t count = 0;
  for (const std::size_t tensor : counts) count += tensor;
  std::vector<float> widened(count);
  const Reduction conversion{dtype, ReduceOp::kSum, {}};
  const std::array<const void*, 1> inputs{data};
  reduce_partial(widened.data(), inputs, count, conversion);
  adasum_in(communicator, widened.data(), counts);
  const std::array<void*, 1> outputs{data};
  finish_partial(outputs, widened.data(), count, conversion);
}

void Communicator::adasum(void* data, std::span<const std::size_t> counts, DType dtype) {
  torch_ring::adasum(*this, data, counts, dtype);
}

}  // namespace torch_ring
