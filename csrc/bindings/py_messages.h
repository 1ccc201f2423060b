// PyMessage: a pending message as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>

#include "messages/message_request.h"

namespace torch_ring {

/// Thread: any, with the GIL.
class PyMessage {
 public:
  explicit PyMessage(std::shared_ptr<MessageRequest> request) : request_(std::move(request)) {}

  bool done() const { return request_->done(); }

  /// Waits without the GIL. Returns the other rank: the one that has sent it, or gets it.
  int wait() const;

 private:
  std::shared_ptr<MessageRequest> request_;
};

void bind_messages(pybind11::module_& module);

}  // namespace torch_ring
