// SPDX-License-Identifier: Apache-2.0
// The exceptions of torch_ring/errors.py for the errors of the core.
#pragma once

#include <exception>

#include "core/error.h"

namespace torch_ring {

/// The error as an exception that torch's C++ code hands on with its type in Python, as DDP's
/// reducer hands a future's to backward(): of an Error, torch would make a plain RuntimeError.
std::exception_ptr through_torch(const Error& error);

/// Translates the core's errors for pybind11. Thread: with the GIL.
void translate(std::exception_ptr pointer);

}  // namespace torch_ring
