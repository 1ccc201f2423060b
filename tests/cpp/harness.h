// SPDX-License-Identifier: Apache-2.0
// TEST and CHECK: a one-page test harness, which needs only g++.
//
//   TEST(name) { CHECK(a); CHECK_EQ(a, b); CHECK_THROWS(f(), ErrorKind::kPeerLost, "rank 1"); }
//
// A failed check throws, so it ends its test. A test's name describes the tested behaviour.
#pragma once

#include <chrono>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/failpoint.h"

namespace torch_ring::test {

#if defined(TORCH_RING_SANITIZED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/// Whether the tests run under an emulator of another processor.
#if defined(TORCH_RING_EMULATED)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

/// The time after which ranks and children count as hung. The longest test takes seconds, and under
/// ThreadSanitizer on a busy machine a minute.
#ifdef __SANITIZE_THREAD__
constexpr std::chrono::seconds kHung{300};
#else
constexpr std::chrono::seconds kHung{45};
#endif

class CheckFailed : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Registers a test; TEST does so for a fixed name. Returns true, to initialise a static variable.
bool add_test(std::string name, std::function<void()> body);
bool add_test(const char* name, void (*body)());

/// Runs fn(0) ... fn(ranks - 1), each in a thread of its own, and waits for all. Throws CheckFailed
/// with the errors of all ranks. If a rank still runs after 45 s, the program ends with the names
/// of such ranks and the errors of the others, because a thread cannot be killed.
void run_ranks(int ranks, const std::function<void(int rank)>& fn);

/// Failpoints for the time of a test.
class Armed {
 public:
  explicit Armed(const std::string& spec) { arm_failpoints(spec); }
  ~Armed() { arm_failpoints(""); }
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
};

[[noreturn]] void fail(const char* file, int line, const std::string& what);

// There are hundreds of checks, so they are small code: they make a string only when they fail.
[[noreturn]] void fail_condition(const char* file, int line, const char* condition);

/// A reference to a function object.
struct Call {
  template <class Fn>
  explicit Call(const Fn& fn)
      : object(&fn), run([](const void* it) { (*static_cast<const Fn*>(it))(); }) {}

  const void* object;
  void (*run)(const void* object);
};

void check_throws(const char* file, int line, Call call, ErrorKind kind, std::string_view part);

template <class T>
std::string shown(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream text;
    text << std::boolalpha << value;
    return text.str();
  } else if constexpr (requires { value.begin(); }) {
    std::string text = "[";
    for (const auto& item : value) text += (text.size() > 1 ? ", " : "") + shown(item);
    return text + "]";
  } else {
    return "(a value)";
  }
}

template <class A, class B>
void check_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + shown(a) + " is not " + shown(b));
}

}  // namespace torch_ring::test

#define TEST(name)                                      \
  static void test_##name();                            \
  [[maybe_unused]] static const bool added_##name =     \
      ::torch_ring::test::add_test(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  ((condition) ? void() : ::torch_ring::test::fail_condition(__FILE__, __LINE__, #condition))

#define CHECK_EQ(a, b) ::torch_ring::test::check_equal(__FILE__, __LINE__, #a " == " #b, a, b)

#define CHECK_THROWS(expression, kind, part)                                                      \
  do {                                                                                            \
    const auto checked = [&] { static_cast<void>(expression); };                                  \
    ::torch_ring::test::check_throws(__FILE__, __LINE__, ::torch_ring::test::Call(checked), kind, \
                                     part);                                                       \
  } while (false)
