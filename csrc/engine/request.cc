// SPDX-License-Identifier: Apache-2.0
#include "engine/request.h"

#include <charconv>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include "core/at.h"

namespace torch_ring {

namespace {

constexpr const char* kCalled[] = {
    nullptr,      "all_reduce",        "all_gather",     "all_gather_into_tensor",
    "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor",
    "barrier"};
static_assert(std::size(kCalled) == static_cast<std::size_t>(Called::kBarrier) + 1);

}  // namespace

std::size_t Fingerprint::count() const {
  std::size_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  return count;
}

std::string Fingerprint::describe() const {
  if (collective == Collective::kJoin) return name_of(collective);
  const auto purpose = in_words(name);
  if (purpose && collective == Collective::kAllgather) return *purpose;  // of bytes, or of rows
  std::ostringstream text;
  const bool is_own = called == Called::kOwn;
  const char* const kind = is_own ? name_of(collective) : kCalled[static_cast<std::size_t>(called)];
  text << purpose.value_or(std::string(kind) + " '" + name + "'");
  if (is_barrier(collective)) return text.str();
  text << ' ' << name_of(dtype) << " [";
  if (has_rows(collective)) text << (shape.empty() ? "*" : "*, ");
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i > 0 ? ", " : "") << shape[i];
  text << ']';
  if (reduces(collective)) text << ' ' << name_of(op);
  if (has_root(collective)) text << " root " << root;
  if (prescale != 1.0) text << " prescale " << prescale;
  if (postscale != 1.0) text << " postscale " << postscale;
  if (group > 0) text << (is_own ? " in a group of " : ", one of ") << group;
  if (group > 0 && !is_own) text << " together";
  if (device == 1) text << " on cuda";
  if (device > 1) text << " on device type " << int{device};
  return text.str();
}

std::size_t Request::input_bytes() const {
  const Fingerprint& f = fingerprint;
  const auto sent = static_cast<std::ptrdiff_t>(f.tells_expected ? rows.size() / 2 : rows.size());
  const std::int64_t count =
      has_rows(f.collective) ? std::accumulate(rows.begin(), rows.begin() + sent, std::int64_t{0})
                             : 1;
  return static_cast<std::size_t>(count) * f.count() * size_of(f.dtype);
}

std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size) {
  std::vector<std::int64_t> shares(static_cast<std::size_t>(size), rows / size);
  for (int rank = 0; rank < rows % size; ++rank) ++at(shares, rank);
  return shares;
}

namespace {

constexpr std::string_view kBackward = "backward.";
constexpr std::string_view kGradients = "gradients.";
constexpr std::string_view kAhead = ".ahead";

/// Takes `prefix` off the front of `text`; returns whether it was there.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// Takes a number off the front of `text`, if there is one.
std::optional<std::uint64_t> take_number(std::string_view& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

/// The meaning of a name that backward synchronisation makes.
struct Meaning {
  const char* kind;   // alike in each pass and for each bucket
  std::string words;  // with the numbers
};

std::optional<Meaning> meaning_of(std::string_view name) {
  constexpr const char* kAgreeing = "agreeing on gradients";
  constexpr const char* kAveraging = "averaging gradients";
  const auto pass = [](std::uint64_t number) {
    return "backward pass " + std::to_string(number + 1);
  };
  if (take(name, kBackward)) {
    const auto number = take_number(name);
    if (!number) return std::nullopt;
    if (name.empty()) return Meaning{kAgreeing, "averaging the gradients of " + pass(*number)};
    if (name == kAhead) {
      return Meaning{kAgreeing, "comparing " + pass(*number) + " with the other ranks"};
    }
    if (name == ".weights") {
      return Meaning{"comparing weights", "comparing the ranks' weights in " + pass(*number)};
    }
    return std::nullopt;
  }
  if (!take(name, kGradients)) return std::nullopt;
  const auto optimizer = take_number(name);
  if (!optimizer || !take(name, ".")) return std::nullopt;
  const auto number = take_number(name);
  if (!number || !take(name, ".")) return std::nullopt;
  if (name == "loss") {  // `number` passes have ended
    return Meaning{"averaging the closure's loss",
                   "averaging the closure's loss after backward pass " + std::to_string(*number)};
  }
  if (take(name, "carried.")) {
    return Meaning{kAveraging, "averaging once more what '" + std::string(name) + "' had before " +
                                   pass(*number)};
  }
  if (take(name, "sparse.")) {
    const auto parameter = std::string(name.substr(0, name.rfind('.')));
    return Meaning{kAveraging,
                   "averaging the sparse gradient of '" + parameter + "' of " + pass(*number)};
  }
  const auto bucket = take_number(name);
  if (!bucket || !name.starts_with('.')) return std::nullopt;
  return Meaning{kAveraging, "averaging the gradients of " + pass(*number) + " (optimizer " +
                                 std::to_string(*optimizer) + ", bucket " +
                                 std::to_string(*bucket) + ")"};
}

}  // namespace

std::string backward_name(std::uint64_t number) {
  return std::string(kBackward).append(std::to_string(number));
}

std::optional<std::uint64_t> planned_pass(std::string_view name) {
  if (!take(name, kBackward)) return std::nullopt;
  const auto number = take_number(name);
  return name == kAhead ? number : std::nullopt;
}

std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin) {
  std::string name(kGradients);
  name.append(std::to_string(optimizer)).append(1, '.').append(std::to_string(number));
  name.append(1, '.').append(std::to_string(bucket)).append(1, '.');
  return name.append(std::to_string(begin));
}

std::optional<std::string> in_words(std::string_view name) {
  auto meaning = meaning_of(name);
  if (!meaning) return std::nullopt;
  return std::move(meaning->words);
}

std::optional<std::string> kind_in_words(std::string_view name) {
  const auto meaning = meaning_of(name);
  if (!meaning) return std::nullopt;
  return meaning->kind;
}

bool all_sent(std::string_view gathered, std::string_view own) {
  if (own.empty() || gathered.size() % own.size() != 0) return false;
  for (std::size_t begin = 0; begin < gathered.size(); begin += own.size()) {
    if (gathered.substr(begin, own.size()) != own) return false;
  }
  return true;
}

}  // namespace torch_ring
