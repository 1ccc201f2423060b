// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "control/graph.h"
#include "control/message.h"
#include "core/at.h"
#include "harness.h"

namespace torch_ring::test::control_message_test {
namespace {

std::vector<Message> parse(int size, const std::string& bytes, std::size_t step) {
  MessageParser parser(size);
  std::vector<Message> messages;
  for (std::size_t i = 0; i < bytes.size(); i += step) {
    parser.append(std::string_view(bytes).substr(i, step));
    while (auto message = parser.next()) messages.push_back(*message);
  }
  return messages;
}

std::vector<Message> samples() {
  return {Message::heartbeat(2),
          Message::lost(3, 1, "died: its connection closed"),
          Message::departed(0),
          Message::left(1, 7, 0x0123456789abcdef, 2, "ValueError: no"),
          Message::departed(3, "OSError"),
          Message::failed(1, 0x0123456789abcdef, Error(ErrorKind::kTimeout, "too slow")),
          Message::waits(2, 7, {0x0123456789abcdef, {0, 3}}),
          Message::waits(2, 7, {0x0123456789abcdf0, {}}),
          Message::asks(1, 3, 0x0123456789abcdef),
          Message::asks(1, 3, 0x0123456789abcdf0, "probe"),
          Message::answers(3, 1, 0x0123456789abcdef, "in train.py:41"),
          Message::stops(1, 0x0123456789abcdef, "SIGTERM"),
          Message::stops(2, 0, {}),
          Message::failed(3, 0, Error(ErrorKind::kInternal, std::string(5000, 'x')))};
}

std::string frames_of(const std::vector<Message>& messages) {
  std::string frames;
  for (const Message& message : messages) message.append_to(frames);
  return frames;
}

TEST(control_messages_arrive_whole_however_the_stream_is_cut) {
  const auto sent = samples();
  CHECK_EQ(sent.back().text.size(), Message::kTextBytes);
  const std::string frames = frames_of(sent);
  for (const std::size_t step : {1u, 3u, 27u, 28u, 29u, 4096u, 100'000u}) {
    CHECK(parse(4, frames, step) == sent);
  }
}

TEST(control_messages_are_checked_before_they_are_believed) {
  const auto refused = [](int size, std::string frame) {
    CHECK_THROWS(parse(size, frame, frame.size()), ErrorKind::kPeerLost,
                 "sent something that is no control message");
  };
  const auto changed = [](const Message& message, std::size_t at, char to) {
    std::string frame = frames_of({message});
    frame[at] = to;
    return frame;
  };
  refused(4, changed(Message::heartbeat(2), 0, 'X'));        // no kind
  refused(4, changed(Message::asks(2, 1, 1), 2, 17));        // too long a question
  refused(4, changed(Message::answers(2, 1, 1, {}), 8, 1));  // in another rank's name
  refused(4, changed(Message::stops(2, 1, {}), 8, 1));       // likewise
  refused(4, changed(Message::stops(2, 1, {}), 12, 1));      // of a set
  const std::string to_nobody = frames_of({Message::asks(2, 4, 1)});
  CHECK_THROWS(parse(4, to_nobody, to_nobody.size()), ErrorKind::kPeerLost,
               "writes to a rank that does not exist");
  refused(4, changed(Message::departed(2), 1, 5));                       // no kind of error
  refused(4, changed(Message::heartbeat(2), 2, 1));                      // an unexpected text
  refused(4, changed(Message::departed(2), 20, 1));                      // rounds of no set
  refused(4, changed(Message::lost(2, 1, "died"), 3, 0x7f));             // too long a text
  refused(2, frames_of({Message::lost(2, 1, "died")}));                  // no such rank
  refused(2, frames_of({Message::lost(1, 2, "died")}));                  // no such reporter
  refused(4, frames_of({Message::lost(2, 2, "died")}));                  // of itself
  refused(4, changed(Message::departed(2), 8, 1));                       // from another
  refused(4, changed(Message::lost(2, 1, "died"), 12, 1));               // of a set
  refused(4, changed(Message::failed(2, 1, Error({}, "")), 7, '\xff'));  // a negative rank
}

TEST(control_messages_are_cut_between_characters) {
  const std::string two_bytes = "\xc3\xa4";
  std::string text = "x";
  while (text.size() <= Message::kTextBytes) text += two_bytes;
  const std::string cut = Message::departed(0, text).text;
  CHECK_EQ(cut, text.substr(0, Message::kTextBytes - 1));
}

TEST(control_messages_of_waits_are_checked) {
  const Message wait = Message::waits(1, 7, {5, {0, 3}});
  CHECK_EQ(wait.wait().number, 5u);
  CHECK_EQ(wait.wait().ranks, (std::vector<int>{0, 3}));
  const auto refused = [](int size, const Message& message) {
    const std::string frame = frames_of({message});
    CHECK_THROWS(parse(size, frame, frame.size()), ErrorKind::kPeerLost, "");
  };
  refused(3, wait);  // a wait for a rank that does not exist
  const auto with_text = [&](const std::string& text) {
    Message changed = wait;
    changed.text = text;
    return changed;
  };
  refused(4, with_text("1234567"));                      // no number
  refused(4, with_text("12345678123"));                  // no whole rank
  refused(4, with_text("12345678\xff\xff\xff\xff"));     // a negative rank
  refused(4, with_text(std::string(8 + 4 * 65, '\0')));  // too many
  const std::vector<int> many(1000, 3);
  CHECK_EQ(Message::waits(1, 7, {5, many}).wait().ranks.size(), Message::Wait::kMostRanks);
}

std::vector<int> hosts_in_turns(int size, int hosts) {
  std::vector<int> host_of;
  for (int rank = 0; rank < size; ++rank) host_of.push_back(rank % hosts);
  return host_of;
}

int log2_ceil(int size) {
  int log = 0;
  while ((1 << log) < size) ++log;
  return log;
}

/// Whether all present ranks can reach one another; also checks symmetry.
bool connected(const Graph& graph, const std::vector<bool>& present) {
  const int size = static_cast<int>(present.size());
  const auto first = static_cast<int>(std::ranges::find(present, true) - present.begin());
  std::vector<bool> reached(present.size(), false);
  std::vector<int> open;
  if (first < size) open.push_back(first);
  while (!open.empty()) {
    const int rank = open.back();
    open.pop_back();
    if (at(reached, rank)) continue;
    at(reached, rank) = true;
    for (const int peer : graph.neighbours(rank, present)) {
      CHECK(at(present, peer));
      CHECK(std::ranges::count(graph.neighbours(peer, present), rank) == 1);
      open.push_back(peer);
    }
  }
  return reached == present;
}

TEST(control_graph_connects_the_survivors_of_any_losses) {
  std::mt19937 random(20);
  for (int round = 0; round < 400; ++round) {
    const int size = 1 + static_cast<int>(random() % (round % 50 == 0 ? 600 : 40));
    const Graph graph(hosts_in_turns(size, 1 + static_cast<int>(random() % 5)));
    std::vector<bool> present(static_cast<std::size_t>(size), true);
    for (int lost = static_cast<int>(random()) % size; lost > 0; --lost) {
      present[random() % present.size()] = false;
    }
    CHECK(connected(graph, present));
    for (int rank = 0; rank < size; ++rank) {
      CHECK(static_cast<int>(graph.neighbours(rank, present).size()) <= 2 * log2_ceil(size) + 2);
    }
  }
}

TEST(neighbourhood_replaces_the_lost_at_once_and_the_departed_later) {
  const std::vector<int> all_but_none{1, 2, 4, 6, 7};
  Neighbourhood neighbourhood(0, std::vector<int>(8, 0));
  const auto now = Clock::now();
  CHECK_EQ(neighbourhood.neighbours(), all_but_none);
  neighbourhood.depart(1, now);
  neighbourhood.depart(2, now);
  CHECK_EQ(neighbourhood.neighbours(), all_but_none);
  CHECK(neighbourhood.next_change() == now + Neighbourhood::kSettle);
  neighbourhood.lose(7);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{1, 2, 4, 6}));
  neighbourhood.lose(6);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{1, 2, 4, 5}));
  neighbourhood.settle(now + Neighbourhood::kSettle);
  CHECK_EQ(neighbourhood.neighbours(), (std::vector<int>{3, 4, 5}));
  CHECK(neighbourhood.next_change() == Clock::time_point::max());
  CHECK(neighbourhood.behind_departed(3));   // 1 and 2 have left
  CHECK(!neighbourhood.behind_departed(5));  // 6 and 7 have died
  CHECK(!neighbourhood.behind_departed(4));  // a finger
}

}  // namespace
}  // namespace torch_ring::test::control_message_test
