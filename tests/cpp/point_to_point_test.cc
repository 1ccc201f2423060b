// SPDX-License-Identifier: Apache-2.0
// PointToPoint: messages that arrive.

#include "message_ranks.h"

namespace torch_ring::test::point_to_point_test {
namespace {

constexpr std::size_t kWhole = MessageStream::kWholeBytes;
const std::vector<std::size_t> kSizes{0, 1, kWhole - 1, kWhole, kWhole + 1, 5'000'000};

struct Case {
  const char* name;
  std::vector<int> host_of;
  MessageRank::Options options = {};
};
const std::vector<Case> kCases{
    {"one host x2", {0, 0}},
    {"hosts x3", {0, 1, 2}},
    {"2 hosts x2, three sockets, checksums", {0, 0, 1, 1}, {3, true}},
};

bool on_all(const std::string& name, const std::function<void(MessageRank&)>& fn) {
  for (const Case& it : kCases) {
    add_test(std::string("messages, ") + it.name + ": " + name,
             [=] { run_messages(it.host_of, fn, it.options); });
  }
  return true;
}

const bool kEverySize = on_all("every size, from every rank to every rank", [](MessageRank& self) {
  for (const std::size_t bytes : kSizes) {
    std::vector<std::vector<std::byte>> sent;
    std::vector<std::vector<std::byte>> received;
    std::vector<MessageRank::Request> sends;
    std::vector<MessageRank::Request> receives;
    for (int peer = 0; peer < self.size(); ++peer) {
      sent.push_back(message(bytes, 10 * self.rank() + peer));
      received.emplace_back(bytes);
    }
    for (int peer = 0; peer < self.size(); ++peer) {
      if (peer == self.rank()) continue;
      receives.push_back(self.receive(at(received, peer), peer));
      sends.push_back(self.send(at(sent, peer), peer));
    }
    for (const auto& send : sends) send->wait();
    for (const auto& receive : receives) {
      receive->wait();
      CHECK_EQ(receive->bytes(), bytes);
      const int source = receive->source();
      CHECK(at(received, source) == message(bytes, 10 * source + self.rank()));
    }
  }
});

TEST(messages_of_one_tag_arrive_in_their_order_and_tags_do_not_mix) {
  run_messages({0, 0}, [](MessageRank& self) {
    constexpr int kCount = 1000;
    constexpr int kTags = 3;
    std::vector<std::vector<std::byte>> bytes;
    std::vector<MessageRank::Request> requests;
    // Short and long messages in turns.
    const auto size_of_message = [](int i) -> std::size_t { return i % 7 == 0 ? kWhole + 5 : 8; };
    if (self.rank() == 0) {
      for (int i = 0; i < kCount; ++i) bytes.push_back(message(size_of_message(i), i));
      for (int i = 0; i < kCount; ++i) requests.push_back(self.send(at(bytes, i), 1, i % kTags));
      for (const auto& request : requests) request->wait();
      return;
    }
    bytes.resize(kCount);
    requests.resize(kCount);
    for (int tag = kTags - 1; tag >= 0; --tag) {  // the last sent first
      for (int i = tag; i < kCount; i += kTags) {
        at(bytes, i).resize(kWhole + 5);
        at(requests, i) = self.receive(at(bytes, i), 0, tag);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      at(requests, i)->wait();
      CHECK_EQ(at(requests, i)->bytes(), size_of_message(i));
      at(bytes, i).resize(size_of_message(i));
      CHECK(at(bytes, i) == message(size_of_message(i), i));
    }
  });
}

TEST(a_receive_from_any_rank_takes_what_comes_and_says_from_whom) {
  run_messages({0, 0, 1, 2}, [](MessageRank& self) {
    constexpr int kEach = 25;
    if (self.rank() != 2) {
      for (int i = 0; i < kEach; ++i) {
        std::vector<std::byte> bytes =
            message(i % 2 == 0 ? 16 : kWhole + 16, 100 * self.rank() + i);
        self.send(bytes, 2, 5)->wait();
      }
      return;
    }
    std::vector<int> seen(4);
    for (int i = 0; i < 3 * kEach; ++i) {
      std::vector<std::byte> bytes(kWhole + 16);
      const auto receive = self.receive(bytes, std::nullopt, 5);
      receive->wait();
      const int source = receive->source();
      const int number = at(seen, source)++;
      bytes.resize(receive->bytes());
      CHECK(bytes == message(number % 2 == 0 ? 16 : kWhole + 16, 100 * source + number));
    }
    CHECK_EQ(seen, (std::vector<int>{kEach, kEach, 0, kEach}));
  });
}

TEST(a_wait_may_end_before_its_request) {
  run_messages({0, 0}, [](MessageRank& self) {
    std::vector<std::byte> bytes = message(50'000, 1);
    if (self.rank() == 1) {
      const auto receive = self.receive(bytes, 0, 1);
      CHECK(!receive->wait_until(self.in(std::chrono::milliseconds(20))));
      struct Interrupted {};
      bool interrupted = false;
      try {
        receive->wait([] { throw Interrupted{}; });
      } catch (const Interrupted&) {
        interrupted = true;
      }
      CHECK(interrupted);
      std::vector<std::byte> go(1);
      self.send(go, 0, 2)->wait();
      CHECK(receive->wait_until(self.in(std::chrono::seconds(20))));
      return;
    }
    std::vector<std::byte> go(1);
    self.receive(go, 1, 2)->wait();
    self.send(bytes, 1, 1)->wait();
  });
}

TEST(a_short_message_does_not_wait_for_a_rank_that_never_uses_messages) {
  const Planes planes = make_planes({0, 1, 1});
  for (const int sender : {0, 2}) {  // of the world: lower and higher than the receiver
    const std::vector<int> members{1, sender};
    MessageRank self(1, members, *at(planes, sender), {});
    std::vector<std::byte> bytes = message(1000, 1);
    self.send(bytes, 0)->wait();
  }
}

}  // namespace
}  // namespace torch_ring::test::point_to_point_test
