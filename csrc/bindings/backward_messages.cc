#include "bindings/backward_messages.h"

namespace torch_ring {

std::string backward_name(std::uint64_t number) {
  return std::string("backward.").append(std::to_string(number));
}

std::string bucket_name(std::size_t optimizer, std::uint64_t number, std::size_t bucket,
                        std::int64_t begin) {
  std::string name = "gradients.";
  name.append(std::to_string(optimizer)).append(1, '.').append(std::to_string(number));
  name.append(1, '.').append(std::to_string(bucket)).append(1, '.');
  return name.append(std::to_string(begin));
}

bool all_sent(std::string_view gathered, std::string_view own) {
  if (own.empty() || gathered.size() % own.size() != 0) return false;
  for (std::size_t begin = 0; begin < gathered.size(); begin += own.size()) {
    if (gathered.substr(begin, own.size()) != own) return false;
  }
  return true;
}

}  // namespace torch_ring
