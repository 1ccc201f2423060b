#include "bindings/c10d_checks.h"

#include <unistd.h>

namespace torch_ring {

void refuse(const std::string& why) { throw Error(ErrorKind::kInvalidArgument, why); }

void refuse_in_child_of(::pid_t process) {
  if (::getpid() != process) refuse("a forked process has no part in the groups of its parent");
}

void require_as_many(const char* what, std::size_t outputs, std::size_t inputs) {
  if (outputs == inputs) return;
  refuse(std::string(what) + ": " + std::to_string(outputs) + " outputs for " +
         std::to_string(inputs) + " inputs");
}

void require_size(const char* what, std::size_t parts, int size) {
  if (parts == static_cast<std::size_t>(size)) return;
  refuse(std::string(what) + ": a list has " + std::to_string(parts) + " tensors for " +
         std::to_string(size) + " ranks");
}

void require_like(const char* what, const at::Tensor& part, const at::Tensor& whole) {
  if (part.scalar_type() == whole.scalar_type() && part.device() == whole.device()) return;
  refuse(std::string(what) + ": the output differs from the input in dtype or device");
}

void require_parts(const char* what, const Tensors& parts, const at::Tensor& own, int size) {
  require_size(what, parts.size(), size);
  for (const at::Tensor& part : parts) {
    require_like(what, part, own);
    if (part.numel() == own.numel()) continue;
    refuse(std::string(what) + ": a tensor of the list has " + std::to_string(part.numel()) +
           " elements, and the other one " + std::to_string(own.numel()));
  }
}

void group(std::vector<Request>& requests) {
  if (requests.size() < 2) return;
  for (Request& request : requests) {
    request.fingerprint.group = static_cast<std::uint32_t>(requests.size());
  }
}

}  // namespace torch_ring
