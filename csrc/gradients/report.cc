// SPDX-License-Identifier: Apache-2.0
#include "gradients/report.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/error.h"

namespace torch_ring {

namespace {

static_assert(std::endian::native == std::endian::little, "put() and number() copy memory");

constexpr std::size_t kDigestBytes = 8;

enum Flag : std::uint8_t {
  kAccumulating = 1,
  kHasDigest = 2,
  kIncomplete = 4,
  kStepping = 8,
  kLate = 16,
  kHasCarried = 32,
  kHasNotFinite = 64,
};

template <class Number>
void put(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// Numbers and texts, from the front of some bytes.
class Encoded {
 public:
  explicit Encoded(std::string_view rest) : rest_(rest) {}

  std::string_view text(std::size_t size) {
    require(size <= rest_.size());
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <class Number>
  Number number() {
    Number number;
    std::memcpy(&number, text(sizeof number).data(), sizeof number);
    return number;
  }
  template <class Number>
  Number peek() const {
    return Encoded(*this).number<Number>();
  }
  bool empty() const { return rest_.empty(); }
  static void require(bool holds) {
    if (!holds) throw Error(ErrorKind::kInternal, "a rank's report has other bytes than its parts");
  }

 private:
  std::string_view rest_;
};

void append(std::string& body, const GradientReport& report) {
  put(body, static_cast<std::uint32_t>(report.optimizer));
  int flags = 0;
  if (report.accumulating) flags |= kAccumulating;
  if (!report.digest.empty()) flags |= kHasDigest;
  if (report.incomplete) flags |= kIncomplete;
  if (report.stepping) flags |= kStepping;
  if (report.late) flags |= kLate;
  if (report.carried.any()) flags |= kHasCarried;
  if (!report.not_finite.empty()) flags |= kHasNotFinite;
  put(body, static_cast<std::uint8_t>(flags));
  put(body, static_cast<std::uint32_t>(report.due.bytes().size()));
  put(body, static_cast<std::uint32_t>(report.sparse.bytes().size()));
  put(body, static_cast<std::uint32_t>(report.order.size()));
  body += report.due.bytes() + report.sparse.bytes();
  for (const std::uint32_t parameter : report.order) put(body, parameter);
  body += report.digest;
  if (report.carried.any()) {
    for (const Bitmap* const each : {&report.carried, &report.unsure}) {
      put(body, static_cast<std::uint32_t>(each->bytes().size()));
      body += each->bytes();
    }
  }
  if (report.not_finite.empty()) return;
  put(body, static_cast<std::uint32_t>(report.not_finite.size()));
  for (const NotFinite& each : report.not_finite) {
    put(body, static_cast<std::uint32_t>(each.parameter));
    put(body, static_cast<std::int32_t>(each.rank));
    put(body, each.worst);
    put(body, each.carries);
  }
}

GradientReport gradients_of(Encoded& bytes) {
  GradientReport report{bytes.number<std::uint32_t>()};
  const auto flags = bytes.number<std::uint8_t>();
  const auto due = bytes.number<std::uint32_t>();
  const auto sparse = bytes.number<std::uint32_t>();
  const auto order = bytes.number<std::uint32_t>();
  report.accumulating = (flags & kAccumulating) != 0;
  report.incomplete = (flags & kIncomplete) != 0;
  report.stepping = (flags & kStepping) != 0;
  report.late = (flags & kLate) != 0;
  report.due = Bitmap(std::string(bytes.text(due)));
  report.sparse = Bitmap(std::string(bytes.text(sparse)));
  for (std::uint32_t i = 0; i < order; ++i) report.order.push_back(bytes.number<std::uint32_t>());
  if ((flags & kHasDigest) != 0) report.digest = bytes.text(kDigestBytes);
  if ((flags & kHasCarried) != 0) {
    for (Bitmap* const each : {&report.carried, &report.unsure}) {
      *each = Bitmap(std::string(bytes.text(bytes.number<std::uint32_t>())));
    }
  }
  const auto count = (flags & kHasNotFinite) != 0 ? bytes.number<std::uint32_t>() : 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::size_t parameter = bytes.number<std::uint32_t>();
    const int rank = bytes.number<std::int32_t>();
    const auto worst = static_cast<Worst>(bytes.number<std::uint8_t>());
    Encoded::require(worst <= Worst::kNaN);
    report.not_finite.push_back({parameter, rank, worst, bytes.number<std::uint8_t>() != 0});
  }
  return report;
}

PassReport report_of(Encoded bytes) {
  PassReport report;
  bytes.number<std::uint32_t>();  // the size
  report.steps = bytes.number<std::uint64_t>();
  report.plan = bytes.number<std::uint32_t>();
  const auto count = bytes.number<std::uint32_t>();
  report.gave_up = bytes.number<std::uint8_t>() != 0;
  for (std::uint32_t i = 0; i < count; ++i) report.gradients.push_back(gradients_of(bytes));
  Encoded::require(bytes.empty());
  return report;
}

}  // namespace

bool PassReport::is_of_step() const {
  return std::ranges::any_of(gradients, &GradientReport::stepping);
}

std::map<std::size_t, Bitmap> PassReport::due() const {
  std::map<std::size_t, Bitmap> found;
  for (const GradientReport& report : gradients) {
    if (report.due.any()) found.emplace(report.optimizer, report.due);
  }
  return found;
}

std::string PassReport::encode() const {
  std::string rest;
  put(rest, steps);
  put(rest, plan);
  put(rest, static_cast<std::uint32_t>(gradients.size()));
  put(rest, static_cast<std::uint8_t>(gave_up));
  for (const GradientReport& report : gradients) append(rest, report);
  std::string encoded;
  put(encoded, static_cast<std::uint32_t>(sizeof(std::uint32_t) + rest.size()));
  return encoded + rest;
}

PassReports PassReport::decode_all(std::string_view encoded) {
  PassReports decoded;
  std::string_view before;
  for (Encoded bytes(encoded); !bytes.empty();) {
    const std::string_view report = bytes.text(bytes.peek<std::uint32_t>());
    const bool is_equal = !decoded.empty() && report == before;  // as they usually are
    decoded.push_back(is_equal ? decoded.back()
                               : std::make_shared<const PassReport>(report_of(Encoded(report))));
    before = report;
  }
  return decoded;
}

}  // namespace torch_ring
