// SPDX-License-Identifier: Apache-2.0
// SHA-256 and HMAC-SHA256: the examples of FIPS 180-4 and RFC 4231, and lengths around a block.
#include "core/sha256.h"

#include <string_view>
#include <vector>

#include "harness.h"

namespace torch_ring::test::sha256_test {
namespace {

using Bytes = std::vector<std::byte>;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    for (const int shift : {4, 0}) {
      text += "0123456789abcdef"[std::to_integer<int>(byte >> shift) & 15];
    }
  }
  return text;
}

std::string digest(std::string_view text) { return hex(sha256(bytes_of(text))); }

TEST(sha256_of_the_examples_of_fips_180_4) {
  CHECK_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(digest(std::string(1'000'000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/// The digests of 0, 1, ... 192 bytes, hashed together: every length of the padding, up to three
/// blocks. The expected one is of Python's hashlib:
///
///   sha256(b"".join(sha256(bytes(i % 251 for i in range(n))).digest() for n in range(193)))
TEST(sha256_of_lengths_around_a_block) {
  Bytes message;
  Bytes digests;
  for (int i = 0; i <= 192; ++i) {
    const Sha256 digest = sha256(message);
    digests.insert(digests.end(), digest.begin(), digest.end());
    message.push_back(static_cast<std::byte>(i % 251));
  }
  CHECK_EQ(hex(sha256(digests)),
           "79eb9ac3f5b94a477808fa851afb214408e787ed21459d0503b2fac4a445fee6");
}

TEST(hmac_sha256_of_the_examples_of_rfc_4231) {
  const auto code = [](const std::string& key, const std::string& message) {
    return hex(hmac_sha256(bytes_of(key), {bytes_of(message)}));
  };
  CHECK_EQ(code(std::string(20, '\x0b'), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(code("Jefe", "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(code(std::string(20, '\xaa'), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counted;
  for (char byte = 1; byte <= 25; ++byte) counted += byte;
  CHECK_EQ(code(counted, std::string(50, '\xcd')),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(code(std::string(20, '\x0c'), "Test With Truncation").substr(0, 32),
           "a3b6167473100ee06e0c796c2955552b");
  CHECK_EQ(code(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(code(std::string(131, '\xaa'),
                "This is a test using a larger than block-size key and a larger than block-size "
                "data. The key needs to be hashed before being used by the HMAC algorithm."),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(equal_in_constant_time_sees_each_bit_and_the_sizes) {
  Bytes a(33, std::byte{0x5a});
  Bytes b = a;
  CHECK(equal_in_constant_time(a, b));
  CHECK(equal_in_constant_time({}, {}));
  CHECK(!equal_in_constant_time(a, std::span(b).first(32)));
  CHECK(!equal_in_constant_time(std::span(a).first(32), b));
  CHECK(!equal_in_constant_time(a, {}));
  CHECK(!equal_in_constant_time({}, b));
  for (std::size_t bit = 0; bit < 8 * b.size(); ++bit) {
    const std::byte mask = std::byte{1} << static_cast<int>(bit % 8);
    b[bit / 8] ^= mask;
    CHECK(!equal_in_constant_time(a, b));
    b[bit / 8] ^= mask;
  }
}

}  // namespace
}  // namespace torch_ring::test::sha256_test
