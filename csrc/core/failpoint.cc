// SPDX-License-Identifier: Apache-2.0
#include "core/failpoint.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/error.h"

namespace torch_ring {

namespace {

constexpr std::array<std::string_view, 11> kPlaces{"collective",
                                                   "waited",
                                                   "departure",
                                                   "departed",
                                                   "handshake.connecting",
                                                   "handshake.accepting",
                                                   "data.receive",
                                                   "data.received",
                                                   "control.receive",
                                                   "alltoall.rows",
                                                   "shared.reduce"};

enum class Action { kKill, kStop, kSleep, kClose, kLate };

struct Point {
  std::string place;
  std::optional<int> rank;  // none: any
  int nth = 0;              // counted from 1; 0: every time
  Action action{};
  std::chrono::milliseconds duration{};
  int reached = 0;
  std::optional<Clock::time_point> since{};  // of kLate: when it was reached first
};

struct Armed {
  std::mutex mutex;  // guards the members below
  std::vector<Point> points;
};

/// Never freed: threads may reach a place while the process exits.
Armed& armed() {
  static auto* const armed = new Armed;
  return *armed;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto end = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, end));
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

[[noreturn]] void refuse(std::string_view point, const std::string& why) {
  throw Error(ErrorKind::kInvalidArgument,
              "TORCH_RING_FAIL: '" + std::string(point) + "': " + why + " (CONTRIBUTING.md)");
}

int number(std::string_view point, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    refuse(point, "'" + std::string(text) + "' is no number");
  }
  return value;
}

void set_action(std::string_view text, std::string_view word, Point& point) {
  const auto parts = split(word, '=');
  const bool timed = parts[0] == "sleep" || parts[0] == "late";
  if (parts.size() != (timed ? 2u : 1u)) refuse(text, "sleep and late need milliseconds");
  if (timed) point.duration = std::chrono::milliseconds(number(text, parts[1]));
  if (parts[0] == "kill") {
    point.action = Action::kKill;
  } else if (parts[0] == "stop") {
    point.action = Action::kStop;
  } else if (parts[0] == "close") {
    point.action = Action::kClose;
  } else if (timed) {
    point.action = parts[0] == "sleep" ? Action::kSleep : Action::kLate;
  } else {
    refuse(text, "the action is kill, stop, close, sleep=ms or late=ms");
  }
}

/// place[:rank][:nth]:action
Point parse(std::string_view text) {
  const auto fields = split(text, ':');
  Point point;
  point.place = fields[0];
  if (std::ranges::find(kPlaces, fields[0]) == kPlaces.end())
    refuse(text, "there is no such place");
  if (fields.size() < 2 || fields.size() > 4) refuse(text, "must be place[:rank][:nth]:action");
  if (fields.size() > 2 && fields[1] != "*") point.rank = number(text, fields[1]);
  if (fields.size() > 3) point.nth = number(text, fields[2]);
  set_action(text, fields.back(), point);
  return point;
}

void sleep_for(std::chrono::milliseconds duration) {
  timespec left{duration.count() / 1000, duration.count() % 1000 * 1'000'000};
  while (::nanosleep(&left, &left) != 0) {
  }
}

}  // namespace

void arm_failpoints(const std::string& spec) {
  std::vector<Point> points;
  if (!spec.empty()) {
    for (const std::string_view text : split(spec, ',')) points.push_back(parse(text));
  }
  Armed& all = armed();
  const std::scoped_lock lock(all.mutex);
  all.points = std::move(points);
  Failpoints::armed_.store(!all.points.empty(), std::memory_order_relaxed);
}

bool Failpoints::reach(const char* place, int rank) {
  std::chrono::milliseconds pause{};
  bool fails = false;
  {
    Armed& all = torch_ring::armed();
    const std::scoped_lock lock(all.mutex);
    for (Point& point : all.points) {
      if (point.place != place || (point.rank && *point.rank != rank)) continue;
      ++point.reached;
      if (point.nth != 0 && point.reached != point.nth) continue;
      switch (point.action) {
        case Action::kKill:
          ::kill(::getpid(), SIGKILL);
          break;
        case Action::kStop:
          ::kill(::getpid(), SIGSTOP);
          break;
        case Action::kSleep:
          pause = std::max(pause, point.duration);
          break;
        case Action::kClose:
          fails = true;
          break;
        case Action::kLate:
          if (!point.since) point.since = Clock::now();
          fails = fails || Clock::now() - *point.since < point.duration;
          break;
      }
    }
  }
  if (pause.count() > 0) sleep_for(pause);
  return fails;
}

}  // namespace torch_ring
