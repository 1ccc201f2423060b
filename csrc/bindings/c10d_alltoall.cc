// alltoall_operation(), alltoall_into_operation()
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/c10d_requests.h"
#include "bindings/joined_tensors.h"
#include "bindings/requests.h"
#include "bindings/result_allocator.h"

namespace torch_ring {

namespace {

/// What all ranks have announced: of each one the rows that it sends to each, and then those that
/// it expects from each.
class Splits {
 public:
  Splits(std::span<const std::int64_t> rows, int size) : rows_(rows), size_(size) {}

  std::int64_t received(int rank) const {
    std::int64_t sum = 0;
    for (int from = 0; from < size_; ++from) sum += sent(from, rank);
    return sum;
  }

  /// The first pair of ranks of which one sends what the other does not expect: the same error on
  /// all ranks. `unit`: what is sent.
  std::optional<Error> misfit(const char* unit) const {
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        if (sent(from, to) == expected(to, from)) continue;
        return Error(ErrorKind::kMismatch,
                     "all_to_all: the ranks' splits do not fit: rank " + std::to_string(from) +
                         " sends " + std::to_string(sent(from, to)) + " " + unit + " to rank " +
                         std::to_string(to) + ", which expects " +
                         std::to_string(expected(to, from)));
      }
    }
    return std::nullopt;
  }

 private:
  std::int64_t sent(int from, int to) const { return row(from, to); }
  std::int64_t expected(int rank, int from) const { return row(rank, size_ + from); }
  std::int64_t row(int rank, int place) const {
    return rows_[static_cast<std::size_t>(rank * 2 * size_ + place)];
  }

  const std::span<const std::int64_t> rows_;
  const int size_;
};

/// The request of an alltoall of `input`, whose rows have `row` elements each. Where splits do not
/// fit, no rank's output changes.
Request scattered_rows_request(const JoinedTensors& output, const at::Tensor& input,
                               const std::vector<std::int64_t>& row,
                               const std::vector<std::int64_t>& output_rows,
                               std::vector<std::int64_t> input_rows, GroupPlace place,
                               const std::shared_ptr<LateError>& late_error) {
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAlltoall, input, "");
  request.fingerprint.shape = row;
  request.rows = std::move(input_rows);
  request.rows.insert(request.rows.end(), output_rows.begin(), output_rows.end());
  request.fingerprint.tells_expected = true;
  request.input = input.const_data_ptr();
  const auto scratch = std::make_shared<at::Tensor>();
  request.allocate = [memory = output.flat(), unit = row.empty() ? "elements" : "rows", place,
                      scratch, late_error,
                      row_count = static_cast<std::int64_t>(request.fingerprint.count())](
                         std::span<const std::int64_t> rows) -> void* {
    const Splits splits(rows, place.size);
    const std::optional<Error> misfit = splits.misfit(unit);
    if (!misfit) return memory.mutable_data_ptr();
    late_error->set(*misfit);
    *scratch = empty_result(memory, {splits.received(place.rank) * row_count});
    return scratch->mutable_data_ptr();
  };
  if (!input.is_cpu()) request.begin = keeper({input, output.flat()});
  request.finish = [input, output, scratch] {
    if (!scratch->defined()) output.write_back();
  };
  return request;
}

std::vector<std::int64_t> rows_of(const at::Tensor& tensor, std::vector<std::int64_t> splits,
                                  const char* which, int size) {
  const std::string what = std::string("all_to_all_single: the ") + which;
  if (tensor.dim() == 0) refuse(what + " is a scalar, which has no first dimension to split");
  if (splits.empty()) {
    if (tensor.size(0) % size != 0) {
      refuse(what + "'s first dimension, " + std::to_string(tensor.size(0)) +
             ", is not divisible by the " + std::to_string(size) + " ranks: give split sizes");
    }
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), tensor.size(0) / size);
  }
  if (splits.size() != static_cast<std::size_t>(size)) {
    refuse(what + " has " + std::to_string(splits.size()) + " split sizes for " +
           std::to_string(size) + " ranks");
  }
  std::int64_t rows = 0;
  for (const std::int64_t split : splits) {
    if (split < 0) refuse(what + " has a negative split size");
    rows += split;
  }
  if (rows != tensor.size(0)) {
    refuse(what + "'s split sizes do not sum up to its first dimension: " + std::to_string(rows) +
           " and " + std::to_string(tensor.size(0)));
  }
  return splits;
}

}  // namespace

C10dOperation alltoall_operation(const Tensors& outputs, const Tensors& inputs, GroupPlace place) {
  constexpr const char* kWhat = "all_to_all";
  require_size(kWhat, outputs.size(), place.size);
  require_size(kWhat, inputs.size(), place.size);
  require_like(kWhat, outputs.front(), inputs.front());
  const auto counts = [](const Tensors& tensors) {
    std::vector<std::int64_t> rows;
    for (const at::Tensor& tensor : tensors) rows.push_back(tensor.numel());
    return rows;
  };
  const at::Tensor input = JoinedTensors::inputs(inputs, kWhat).flat();
  C10dOperation operation{{}, outputs, std::make_shared<LateError>()};
  operation.requests.push_back(
      scattered_rows_request(JoinedTensors::outputs(outputs, kWhat, &input), input, {},
                             counts(outputs), counts(inputs), place, operation.late_error));
  return operation;
}

C10dOperation alltoall_into_operation(const at::Tensor& output, const at::Tensor& input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, GroupPlace place) {
  constexpr const char* kWhat = "all_to_all_single";
  require_like(kWhat, output, input);
  const std::vector<std::int64_t> output_rows =
      rows_of(output, std::move(output_splits), "output", place.size);
  std::vector<std::int64_t> input_rows =
      rows_of(input, std::move(input_splits), "input", place.size);
  const std::vector<std::int64_t> row = input.sizes().slice(1).vec();
  if (output.sizes().slice(1).vec() != row) {
    refuse(std::string(kWhat) + ": the rows of the output and of the input differ in shape");
  }
  const at::Tensor values = JoinedTensors::inputs({input}, kWhat).flat();
  C10dOperation operation{{}, {output}, std::make_shared<LateError>()};
  operation.requests.push_back(
      scattered_rows_request(JoinedTensors::outputs({output}, kWhat, &values), values, row,
                             output_rows, std::move(input_rows), place, operation.late_error));
  return operation;
}

}  // namespace torch_ring
