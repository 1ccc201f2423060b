// SPDX-License-Identifier: Apache-2.0
// Band, Bor and Bxor: the arithmetic, every transport, and the refused cases.
#include <array>

#include "communicator_suite.h"
#include "core/reduce.h"
#include "engine/entry.h"

namespace torch_ring::test::bitwise_test {

namespace {

constexpr std::array kBitwise{ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor};
constexpr std::array kWholes{DType::kUInt8, DType::kInt8,  DType::kInt16,
                             DType::kInt32, DType::kInt64, DType::kBool};

/// Byte i of rank r; every bit is set on some ranks and clear on others. A bool is 0 or 1.
unsigned char byte_at(DType dtype, int rank, std::size_t i) {
  const std::size_t mixed = (i * 37 + static_cast<std::size_t>(rank) * 101 + i % 7 * 64) % 256;
  return static_cast<unsigned char>(dtype == DType::kBool ? mixed % 3 % 2 : mixed);
}

Bytes bytes_of_rank(DType dtype, int rank, std::size_t count) {
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte{byte_at(dtype, rank, i)};
  return bytes;
}

Bytes reduced(DType dtype, ReduceOp op, int size, std::size_t count) {
  Bytes result = bytes_of_rank(dtype, 0, count);
  for (int rank = 1; rank < size; ++rank) {
    for (std::size_t i = 0; i < result.size(); ++i) {
      const std::byte other{byte_at(dtype, rank, i)};
      if (op == ReduceOp::kBand) result[i] &= other;
      if (op == ReduceOp::kBor) result[i] |= other;
      if (op == ReduceOp::kBxor) result[i] ^= other;
    }
  }
  return result;
}

void check_bitwise(Communicator& communicator, DType dtype, ReduceOp op, std::size_t count) {
  const int size = communicator.size();
  const int rank = communicator.rank();
  const Bytes input = bytes_of_rank(dtype, rank, count);
  const Bytes expected = reduced(dtype, op, size, count);
  Bytes output(input.size());
  communicator.allreduce(input.data(), output.data(), count, {dtype, op, {}});
  CHECK(same(output, expected));

  Bytes at_root(input.size());
  const int root = static_cast<int>(count) % size;
  communicator.reduce_to(root, input.data(), at_root.data(), count, {dtype, op, {}});
  CHECK(same(at_root, rank == root ? expected : Bytes(input.size())));

  std::vector<std::size_t> counts(static_cast<std::size_t>(size),
                                  count / static_cast<std::size_t>(size));
  counts.back() += count % static_cast<std::size_t>(size);
  const Range own = at(ranges_of(counts), rank);
  Bytes part(own.count * size_of(dtype));
  communicator.reducescatter(input.data(), part.data(), counts, {dtype, op, {}});
  const std::byte* const due = expected.data() + own.begin * size_of(dtype);
  CHECK(same(part, Bytes(due, due + part.size())));
}

void bitwise_of_every_edge(const Layout& layout, int size) {
  run_world(layout, size, [&](Communicator& communicator, Abort&) {
    for (const DType dtype : kWholes) {
      if (kSanitized && dtype != DType::kInt32) continue;  // as in allreduce_all()
      for (const ReduceOp op : kBitwise) {
        for (const std::size_t count : counts_for(size)) {
          check_bitwise(communicator, dtype, op, count);
        }
      }
    }
    check_bitwise(communicator, DType::kInt32, ReduceOp::kBxor, kSanitized ? 200'001 : 600'003);
  });
}

[[maybe_unused]] const bool added = [] {
  for (const Layout& layout :
       {Layout{"shm", one_host}, Layout{"ring", one_rank_a_host},
        Layout{"two hosts", two_hosts, {3, 4}}, Layout{"three hosts", three_hosts, {4, 5}}}) {
    add_for_sizes(layout, "bitwise operators of every dtype and edge", bitwise_of_every_edge);
  }
  return true;
}();

}  // namespace

TEST(bitwise_identity_changes_nothing) {
  constexpr std::size_t kCount = 1500;  // more than a block
  for (const DType dtype : kWholes) {
    for (const ReduceOp op : kBitwise) {
      Bytes identity(kCount * size_of(dtype), std::byte{0x5a});
      fill_identity(identity.data(), kCount, dtype, op);
      const Bytes values = bytes_of_rank(dtype, 3, kCount);
      Bytes result(values.size());
      for (const bool first : {false, true}) {
        const std::array<const void*, 3> inputs{first ? identity.data() : values.data(),
                                                first ? values.data() : identity.data(),
                                                identity.data()};
        const std::array<void*, 1> outputs{result.data()};
        reduce(outputs, inputs, kCount, {dtype, op, {}});
        CHECK(same(result, values));
      }
    }
  }
}

TEST(bitwise_operators_are_of_whole_numbers_and_bools) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool whole = std::find(kWholes.begin(), kWholes.end(), dtype) != kWholes.end();
    for (const ReduceOp op : kBitwise) {
      CHECK_EQ(can_reduce(dtype, op), whole);
      // A rank's announcement is checked, too.
      Fingerprint fingerprint;
      fingerprint.dtype = dtype;
      fingerprint.op = op;
      fingerprint.name = "a";
      std::vector<std::byte> encoded;
      encode(fingerprint, encoded);
      if (whole) {
        CHECK(decode(encoded) == fingerprint);
      } else {
        CHECK_THROWS(decode(encoded), ErrorKind::kInternal, "broken entry");
      }
    }
  }
}

TEST(bitwise_operators_of_tensors_on_a_device_run_on_the_host) {
  Fingerprint fingerprint;
  fingerprint.device = 1;
  for (const ReduceOp op : kBitwise) {
    fingerprint.op = op;
    CHECK(fingerprint.on_host());
  }
  fingerprint.op = ReduceOp::kMax;
  CHECK(!fingerprint.on_host());
}

}  // namespace torch_ring::test::bitwise_test
