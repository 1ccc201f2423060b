// as_text(): a string of Python of bytes that another program may have sent.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

namespace torch_ring {

/// Bytes that are no UTF-8 are replaced. Needs the GIL.
inline pybind11::str as_text(std::string_view bytes) {
  PyObject* const text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

}  // namespace torch_ring
