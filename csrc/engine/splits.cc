#include "engine/splits.h"

#include <utility>

namespace torch_ring {

std::optional<Misfit> take_expected(std::vector<std::int64_t>& rows, int size) {
  const auto each = static_cast<std::size_t>(size);
  std::optional<Misfit> misfit;
  if (rows.size() != 2 * each * each) return misfit;
  std::vector<std::int64_t> all_sent;
  all_sent.reserve(each * each);
  for (std::size_t from = 0; from < each; ++from) {
    for (std::size_t to = 0; to < each; ++to) {
      const std::int64_t sent = rows[2 * each * from + to];
      const std::int64_t expected = rows[2 * each * to + each + from];
      all_sent.push_back(sent);
      if (sent != expected && !misfit) {
        misfit = Misfit{static_cast<int>(from), static_cast<int>(to), sent, expected};
      }
    }
  }
  rows = std::move(all_sent);
  return misfit;
}

}  // namespace torch_ring
