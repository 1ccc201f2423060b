#include "engine/backward_messages.h"

#include <charconv>

namespace torch_ring {

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

}  // namespace

std::string backward_name(std::uint64_t number) {
  return std::string(kBackward).append(std::to_string(number));
}

std::optional<std::uint64_t> planned_pass(std::string_view name) {
  if (!take(name, kBackward)) return std::nullopt;
  const auto number = take_number(name);
  return name == kAhead ? number : std::nullopt;
}

std::optional<KeptGradient> kept_gradient(std::string_view name) {
  if (!take(name, kGradients)) return std::nullopt;
  const auto optimizer = take_number(name);
  if (!optimizer || !take(name, ".")) return std::nullopt;
  const auto number = take_number(name);
  if (!number || !take(name, ".kept.")) return std::nullopt;
  const auto parameter = take_number(name);
  if (!parameter || !name.empty()) return std::nullopt;
  return KeptGradient{static_cast<std::int64_t>(*optimizer), static_cast<std::int64_t>(*number),
                      static_cast<std::int64_t>(*parameter)};
}

std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin) {
  std::string name(kGradients);
  name.append(std::to_string(optimizer)).append(1, '.').append(std::to_string(number));
  name.append(1, '.').append(std::to_string(bucket)).append(1, '.');
  return name.append(std::to_string(begin));
}

std::optional<std::string> in_words(std::string_view name) {
  const auto pass = [](std::uint64_t number) {
    return "backward pass " + std::to_string(number + 1);
  };
  if (take(name, kBackward)) {
    const auto number = take_number(name);
    if (number && name.empty()) return "averaging the gradients of " + pass(*number);
    if (number && name == kAhead) return "comparing " + pass(*number) + " with the other ranks";
    if (number && name == ".weights") return "comparing the ranks' weights in " + pass(*number);
    return std::nullopt;
  }
  if (!take(name, kGradients)) return std::nullopt;
  const auto optimizer = take_number(name);
  if (!optimizer || !take(name, ".")) return std::nullopt;
  const auto number = take_number(name);
  if (!number || !take(name, ".")) return std::nullopt;
  if (name == "loss") return "averaging the closure's loss after " + pass(*number);
  if (name.starts_with("kept")) {
    return "asking ranks that have joined for the gradients that " + pass(*number) + " adds to";
  }
  if (take(name, "sparse.")) {
    const auto parameter = std::string(name.substr(0, name.rfind('.')));
    return "averaging the sparse gradient of '" + parameter + "' of " + pass(*number);
  }
  const auto bucket = take_number(name);
  if (!bucket || !name.starts_with('.')) return std::nullopt;
  return "averaging the gradients of " + pass(*number) + " (optimizer " +
         std::to_string(*optimizer) + ", bucket " + std::to_string(*bucket) + ")";
}

bool all_sent(std::string_view gathered, std::string_view own) {
  if (own.empty() || gathered.size() % own.size() != 0) return false;
  for (std::size_t begin = 0; begin < gathered.size(); begin += own.size()) {
    if (gathered.substr(begin, own.size()) != own) return false;
  }
  return true;
}

}  // namespace torch_ring
