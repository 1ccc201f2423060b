// SPDX-License-Identifier: Apache-2.0
// Checksums: CRC-32C, the frames that carry it, and the error of a bit that flips on the way.
#include "transport/checked_stream.h"

#include <optional>
#include <string_view>

#include "core/crc32c.h"
#include "elements.h"
#include "harness.h"

namespace torch_ring::test::checked_stream_test {
namespace {

void check_crc(const Bytes& bytes, std::uint32_t expected) {
  CHECK_EQ(crc32c(bytes), expected);
  CHECK_EQ(crc32c_by_table(bytes), expected);
}

Bytes counting(int first, int step) {
  Bytes bytes;
  for (int i = 0; i < 32; ++i) bytes.push_back(static_cast<std::byte>(first + step * i));
  return bytes;
}

Bytes pattern(std::size_t count) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 255);
  return bytes;
}

/// The stream that a writer makes of `data`, with `first` bytes in the first send(). The stream
/// takes at most `room` bytes at a time.
Bytes written(const Bytes& data, std::size_t first, std::size_t room) {
  CheckedWriter writer;
  Bytes stream;
  std::size_t done = 0;
  while (done < data.size()) {
    const std::size_t end = done < first ? first : data.size();
    done += writer.send(std::span(data).subspan(done, end - done), [&](auto bytes) {
      const auto part = bytes.first(std::min(bytes.size(), room));
      stream.insert(stream.end(), part.begin(), part.end());
      return part.size();
    });
  }
  return stream;
}

/// The data that a reader gets from a stream of at most `room` bytes at a time; nothing if it
/// refuses the stream. A stream that ends too early counts as refused: a connection would time out.
std::optional<Bytes> read(const Bytes& stream, std::size_t count, std::size_t room) {
  CheckedReader reader;
  Bytes data(count);
  std::size_t done = 0;
  std::size_t taken = 0;
  while (done < count) {
    const auto arrived = reader.receive(std::span(data).subspan(done), [&](auto bytes) {
      const std::size_t part = std::min({bytes.size(), room, stream.size() - taken});
      std::copy_n(stream.begin() + static_cast<std::ptrdiff_t>(taken), part, bytes.begin());
      taken += part;
      return part;
    });
    if (!arrived || (*arrived == 0 && taken == stream.size())) return std::nullopt;
    done += *arrived;
  }
  return data;
}

TEST(crc32c_of_the_vectors_of_rfc_3720) {
  check_crc({}, 0);
  check_crc(Bytes(32, std::byte{0}), 0x8A9136AA);
  check_crc(Bytes(32, std::byte{0xFF}), 0x62A8AB43);
  check_crc(counting(0, 1), 0x46DD794E);
  check_crc(counting(31, -1), 0x113FDB5C);
  const std::string_view digits = "123456789";
  const auto bytes = std::as_bytes(std::span(digits));
  check_crc({bytes.begin(), bytes.end()}, 0xE3069283);
}

TEST(crc32c_of_parts_is_that_of_the_whole_at_any_place) {
  const Bytes all = pattern(1003);
  const std::uint32_t whole = crc32c_by_table(all);
  for (std::size_t first = 0; first <= all.size(); first += 17) {
    const auto bytes = std::span<const std::byte>(all);
    CHECK_EQ(crc32c(bytes.subspan(first), crc32c(bytes.first(first))), whole);
    CHECK_EQ(crc32c_by_table(bytes.subspan(first), crc32c(bytes.first(first))), whole);
  }
}

TEST(checked_stream_arrives_in_parts_of_any_length) {
  for (const std::size_t count : {1u, 2u, 1000u, 600'001u}) {
    const Bytes data = pattern(count);
    for (const std::size_t room : {std::size_t{count < 2000 ? 1u : 777u}, std::size_t{1u << 20}}) {
      const Bytes stream = written(data, count / 3, room);
      CHECK(stream.size() > count);
      for (const std::size_t reading : {room, std::size_t{5000}}) {
        const auto arrived = read(stream, count, reading);
        CHECK(arrived && same(*arrived, data));
      }
    }
  }
}

TEST(checked_stream_refuses_every_flipped_bit) {
  const Bytes data = pattern(100);
  const Bytes stream = written(data, 40, 1000);
  CHECK_EQ(stream.size(), 100 + 2 * CheckedFrame::kHeaderBytes);
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    Bytes damaged = stream;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    CHECK(!read(damaged, 100, 1000));
  }
}

}  // namespace
}  // namespace torch_ring::test::checked_stream_test
