// alltoall_operation(), alltoall_into_operation()
#include <numeric>
#include <string>
#include <utility>

#include "bindings/c10d_requests.h"
#include "bindings/joined_tensors.h"
#include "bindings/requests.h"
#include "bindings/result_allocator.h"

namespace torch_ring {

namespace {

/// The request of an alltoall of `input`, whose rows have `row` elements each.
Request scattered_rows_request(const JoinedTensors& output, const at::Tensor& input,
                               std::vector<std::int64_t> row, std::vector<std::int64_t> output_rows,
                               std::vector<std::int64_t> input_rows,
                               const std::shared_ptr<LateError>& late_error) {
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAlltoall, input, "");
  request.fingerprint.shape = std::move(row);
  request.rows = std::move(input_rows);
  request.input = input.const_data_ptr();
  const auto scratch = std::make_shared<at::Tensor>();
  request.allocate = [memory = output.flat(), expected = std::move(output_rows), scratch,
                      late_error,
                      row_count = static_cast<std::int64_t>(request.fingerprint.count())](
                         std::span<const std::int64_t> received) -> void* {
    for (std::size_t rank = 0; rank < received.size(); ++rank) {
      if (received[rank] == expected[rank]) continue;
      late_error->set(Error(ErrorKind::kInvalidArgument,
                            "all_to_all: rank " + std::to_string(rank) + " has sent " +
                                std::to_string(received[rank]) + " rows, and the output has room " +
                                "for " + std::to_string(expected[rank])));
      const auto rows = std::accumulate(received.begin(), received.end(), std::int64_t{0});
      *scratch = empty_result(memory, {rows * row_count});
      return scratch->mutable_data_ptr();
    }
    return memory.mutable_data_ptr();
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

C10dOperation alltoall_operation(const Tensors& outputs, const Tensors& inputs, int size) {
  constexpr const char* kWhat = "all_to_all";
  require_size(kWhat, outputs.size(), size);
  require_size(kWhat, inputs.size(), size);
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
                             counts(outputs), counts(inputs), operation.late_error));
  return operation;
}

C10dOperation alltoall_into_operation(const at::Tensor& output, const at::Tensor& input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, int size) {
  constexpr const char* kWhat = "all_to_all_single";
  require_like(kWhat, output, input);
  std::vector<std::int64_t> output_rows = rows_of(output, std::move(output_splits), "output", size);
  std::vector<std::int64_t> input_rows = rows_of(input, std::move(input_splits), "input", size);
  const std::vector<std::int64_t> row = input.sizes().slice(1).vec();
  if (output.sizes().slice(1).vec() != row) {
    refuse(std::string(kWhat) + ": the rows of the output and of the input differ in shape");
  }
  const at::Tensor values = JoinedTensors::inputs({input}, kWhat).flat();
  C10dOperation operation{{}, {output}, std::make_shared<LateError>()};
  operation.requests.push_back(
      scattered_rows_request(JoinedTensors::outputs({output}, kWhat, &values), values, row,
                             std::move(output_rows), std::move(input_rows), operation.late_error));
  return operation;
}

}  // namespace torch_ring
