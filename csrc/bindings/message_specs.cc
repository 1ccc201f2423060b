#include "bindings/message_specs.h"

#include <memory>
#include <string>

#include "bindings/dtypes.h"
#include "bindings/tensor_memory.h"

namespace torch_ring {

namespace {

void check(const at::Tensor& tensor, const std::string& what) {
  if (!tensor.is_cpu()) {
    throw Error(ErrorKind::kInvalidArgument,
                what + ": messages are of tensors on the CPU, and this one is on " +
                    tensor.device().str() + ": copy it");
  }
  check_tensor(tensor, what);
}

/// A message of the contiguous `memory`, which it keeps.
MessageSpec spec_of(const at::Tensor& memory, std::optional<int> peer, int tag) {
  MessageSpec spec;
  spec.peer = peer;
  spec.tag = tag;
  spec.dtype = dtype_of(memory);
  spec.owner = std::make_shared<at::Tensor>(memory);
  return spec;
}

std::span<std::byte> bytes_of(const void* begin, std::size_t bytes) {
  // A send only reads: the same span serves both ends of a message.
  return {static_cast<std::byte*>(const_cast<void*>(begin)), bytes};
}

}  // namespace

MessageSpec send_spec(const at::Tensor& tensor, int destination, int tag) {
  check(tensor, "send");
  const at::Tensor values = values_of(tensor);
  MessageSpec spec = spec_of(values, destination, tag);
  spec.memory = bytes_of(values.const_data_ptr(), values.nbytes());
  return spec;
}

MessageSpec receive_spec(const at::Tensor& tensor, std::optional<int> source, int tag) {
  check(tensor, "receive");
  check_writable(tensor, "receive");
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  const at::Tensor target = tensor.detach();
  // A clone has the values that a shorter message leaves as they are.
  const at::Tensor memory = is_plain(target) ? target : target.clone(at::MemoryFormat::Contiguous);
  MessageSpec spec = spec_of(memory, source, tag);
  spec.is_send = false;
  spec.memory = bytes_of(memory.mutable_data_ptr(), memory.nbytes());
  if (!memory.is_same(target)) {
    spec.received = [target, memory] {
      const ForCaller for_caller(target.is_inference());
      torch_call([&] { target.copy_(memory); });
    };
  }
  return spec;
}

}  // namespace torch_ring
