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

std::optional<Error> misfit_of(const Fingerprint& fingerprint, std::vector<std::int64_t>& rows,
                               int size, const std::function<std::string(int)>& name_of) {
  if (!fingerprint.tells_expected) return std::nullopt;
  const std::optional<Misfit> misfit = take_expected(rows, size);
  if (!misfit) return std::nullopt;
  return Error(ErrorKind::kMismatch,
               "the ranks' splits do not fit: " + name_of(misfit->from) + " sends " +
                   std::to_string(misfit->sent) +
                   (fingerprint.shape.empty() ? " elements to " : " rows to ") +
                   name_of(misfit->to) + ", which expects " + std::to_string(misfit->expected));
}

}  // namespace torch_ring
