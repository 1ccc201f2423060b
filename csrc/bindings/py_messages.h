// SPDX-License-Identifier: Apache-2.0
// PyMessage, totals_of(): messages in Python.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "messages/message_request.h"

namespace pybind11 {
class dict;
class module_;
}  // namespace pybind11

namespace torch_ring {

/// Thread: any, with the GIL.
class PyMessage {
 public:
  explicit PyMessage(std::shared_ptr<MessageRequest> request) : request_(std::move(request)) {}

  bool done() const { return request_->done(); }

  /// Waits without the GIL. Returns the other rank: the sender or the receiver.
  int wait() const;

 private:
  std::shared_ptr<MessageRequest> request_;
};

/// The sums for Python: Engine.message_totals().
pybind11::dict totals_of(const MessageTotals& totals);

/// Adds Message and MessageRecord (torch_ring/_C.pyi documents them).
void bind_messages(pybind11::module_& module);

}  // namespace torch_ring
