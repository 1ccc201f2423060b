// alltoall_operation(), alltoall_into_operation()
#include <span>
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
                               std::vector<std::int64_t> row,
                               const std::vector<std::int64_t>& output_rows,
                               std::vector<std::int64_t> input_rows) {
  Request request;
  request.fingerprint = fingerprint_of(Collective::kAlltoall, input, "");
  request.fingerprint.shape = std::move(row);
  request.fingerprint.tells_expected = true;  // so that the output has room
  request.rows = std::move(input_rows);
  request.rows.insert(request.rows.end(), output_rows.begin(), output_rows.end());
  request.input = input.const_data_ptr();
  request.allocate = [memory = output.flat()](std::span<const std::int64_t>) {
    return memory.mutable_data_ptr();
  };
  if (!input.is_cpu()) request.begin = keeper({input, output.flat()});
  request.finish = [input, output] { output.write_back(); };
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
  C10dOperation operation{{}, outputs};
  operation.requests.push_back(scattered_rows_request(
      JoinedTensors::outputs(outputs, kWhat, &input), input, {}, counts(outputs), counts(inputs)));
  return operation;
}

C10dOperation alltoall_into_operation(const at::Tensor& output, const at::Tensor& input,
                                      std::vector<std::int64_t> output_splits,
                                      std::vector<std::int64_t> input_splits, int size) {
  constexpr const char* kWhat = "all_to_all_single";
  require_like(kWhat, output, input);
  const std::vector<std::int64_t> output_rows =
      rows_of(output, std::move(output_splits), "output", size);
  std::vector<std::int64_t> input_rows = rows_of(input, std::move(input_splits), "input", size);
  const std::vector<std::int64_t> row = input.sizes().slice(1).vec();
  if (output.sizes().slice(1).vec() != row) {
    refuse(std::string(kWhat) + ": the rows of the output and of the input differ in shape");
  }
  const at::Tensor values = JoinedTensors::inputs({input}, kWhat).flat();
  C10dOperation operation{{}, {output}};
  operation.requests.push_back(
      scattered_rows_request(JoinedTensors::outputs({output}, kWhat, &values), values, row,
                             output_rows, std::move(input_rows)));
  return operation;
}

}  // namespace torch_ring
