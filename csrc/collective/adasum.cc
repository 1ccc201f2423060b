// SPDX-License-Identifier: Apache-2.0
#include "collective/adasum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <numeric>
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

/// The tensors' pieces, one per rank of each tensor, in the order of halving: piece 0 of every
/// tensor, piece 1 of every tensor, and so on. So a rank's half has half of every tensor, and the
/// dot products of a tensor do not depend on its neighbours.
class Pieces {
 public:
  Pieces(std::span<const std::size_t> counts, int levels)
      : tensors_(counts.size()), levels_(levels) {
    for (int piece = 0; piece < 1 << levels; ++piece) {
      std::size_t begin = 0;
      for (const std::size_t count : counts) {
        const Range part = adasum_range(count, rank_of(piece), levels);
        in_tensors_.push_back({begin + part.begin, part.count});
        lengths_.push_back(part.count);
        begin += count;
      }
    }
    in_order_ = ranges_of(lengths_);
  }

  std::size_t tensors() const { return tensors_; }

  /// Calls fn(place in the order above, place in the consecutive tensors) for every piece.
  template <class Fn>
  void for_each(Fn&& fn) const {
    for (std::size_t i = 0; i < in_order_.size(); ++i) fn(in_order_[i], in_tensors_[i]);
  }

  /// The elements on which `rank` works after `halvings` exchanges, in the order above.
  Range kept(int rank, int halvings) const {
    if (tensors_ == 0) return {};
    const auto [first, count] = pieces_of(rank, halvings);
    const Range& begin = in_order_[first * tensors_];
    const Range& last = in_order_[(first + count) * tensors_ - 1];
    return {begin.begin, last.begin + last.count - begin.begin};
  }

  /// Calls fn(piece) for the kept pieces of one tensor.
  template <class Fn>
  void for_kept(int rank, int halvings, std::size_t tensor, Fn&& fn) const {
    const auto [first, count] = pieces_of(rank, halvings);
    for (std::size_t i = first; i < first + count; ++i) fn(in_order_[i * tensors_ + tensor]);
  }

 private:
  /// The rank that ends up with a piece: the lowest bit chooses the first half.
  int rank_of(int piece) const {
    int rank = 0;
    for (int level = 0; level < levels_; ++level) {
      rank |= (piece >> (levels_ - 1 - level) & 1) << level;
    }
    return rank;
  }

  Range pieces_of(int rank, int halvings) const {
    const int own = rank_of(rank);  // its own inverse
    const int left = levels_ - halvings;
    return {static_cast<std::size_t>(own >> left << left), std::size_t{1} << left};
  }

  const std::size_t tensors_;
  const int levels_;
  std::vector<std::size_t> lengths_;
  std::vector<Range> in_tensors_;
  std::vector<Range> in_order_;
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
void swap_halves(Communicator& communicator, const T* data, T* received, const Pieces& pieces,
                 int level) {
  const int size = communicator.size();
  const int bit = 1 << level;
  std::vector<std::size_t> bytes(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    at(bytes, rank * size + (rank ^ bit)) = pieces.kept(rank ^ bit, level + 1).count * sizeof(T);
  }
  const Range given = pieces.kept(communicator.rank() ^ bit, level + 1);
  communicator.alltoall(data + given.begin, received, bytes);
}

/// Gathers the parts of all ranks on every rank. `scratch` is as long as `data`.
template <class T>
void gather(Communicator& communicator, T* data, T* scratch, const Pieces& pieces, int levels) {
  std::vector<std::size_t> bytes;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    bytes.push_back(pieces.kept(rank, levels).count * sizeof(T));
  }
  const Range own = pieces.kept(communicator.rank(), levels);
  communicator.allgather(data + own.begin, scratch, bytes);
  const T* at = scratch;  // in the order of ranks
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const Range range = pieces.kept(rank, levels);
    std::copy_n(at, range.count, data + range.begin);
    at += range.count;
  }
}

/// Reduces `data`, which is in the order of `pieces`. `scratch` is as long.
template <class T>
void adasum_in(Communicator& communicator, T* data, T* scratch, const Pieces& pieces) {
  const int levels = std::countr_zero(static_cast<unsigned>(communicator.size()));
  const int rank = communicator.rank();
  T* const received = scratch;
  for (int level = 0; level < levels; ++level) {
    swap_halves(communicator, data, received, pieces, level);
    const Range kept = pieces.kept(rank, level + 1);
    const bool has_a = (rank >> level & 1) == 0;

    std::vector<Dots> dots(pieces.tensors());
    for (std::size_t i = 0; i < dots.size(); ++i) {
      pieces.for_kept(rank, level + 1, i, [&](Range part) {
        const T* const mine = data + part.begin;
        const T* const theirs = received + (part.begin - kept.begin);
        dots[i] += has_a ? Dots::of(mine, theirs, part.count) : Dots::of(theirs, mine, part.count);
      });
    }
    dots = summed(communicator, dots, level + 1);
    for (std::size_t i = 0; i < dots.size(); ++i) {
      const double a = dots[i].factor_of_a();
      const double b = dots[i].factor_of_b();
      const T own = static_cast<T>(has_a ? a : b);
      const T other = static_cast<T>(has_a ? b : a);
      pieces.for_kept(rank, level + 1, i, [&](Range part) {
        for (std::size_t j = part.begin; j < part.begin + part.count; ++j) {
          data[j] = own * data[j] + other * received[j - kept.begin];
        }
      });
    }
  }
  gather(communicator, data, scratch, pieces, levels);
}

/// Reduces consecutive tensors.
template <class T>
void adasum_tensors(Communicator& communicator, T* data, std::span<const std::size_t> counts) {
  const Pieces pieces(counts, std::countr_zero(static_cast<unsigned>(communicator.size())));
  const auto count = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const auto scratch = std::make_unique_for_overwrite<T[]>(count);
  if (counts.size() == 1) return adasum_in(communicator, data, scratch.get(), pieces);

  const auto ordered = std::make_unique_for_overwrite<T[]>(count);
  pieces.for_each([&](Range in_order, Range in_tensors) {
    std::copy_n(data + in_tensors.begin, in_order.count, ordered.get() + in_order.begin);
  });
  adasum_in(communicator, ordered.get(), scratch.get(), pieces);
  pieces.for_each([&](Range in_order, Range in_tensors) {
    std::copy_n(ordered.get() + in_order.begin, in_order.count, data + in_tensors.begin);
  });
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
  if (dtype == DType::kFloat32)
    return adasum_tensors(communicator, static_cast<float*>(data), counts);
  if (dtype == DType::kFloat64)
    return adasum_tensors(communicator, static_cast<double*>(data), counts);

  std::size_t count = 0;
  for (const std::size_t tensor : counts) count += tensor;
  std::vector<float> widened(count);
  const Reduction conversion{dtype, ReduceOp::kSum, {}};
  const std::array<const void*, 1> inputs{data};
  reduce_partial(widened.data(), inputs, count, conversion);
  adasum_tensors(communicator, widened.data(), counts);
  const std::array<void*, 1> outputs{data};
  finish_partial(outputs, widened.data(), count, conversion);
}

void Communicator::adasum(void* data, std::span<const std::size_t> counts, DType dtype) {
  torch_ring::adasum(*this, data, counts, dtype);
}

}  // namespace torch_ring
