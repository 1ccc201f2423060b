// SPDX-License-Identifier: Apache-2.0
// PointToPoint: messages that do not fit, ranks that are gone, and the end.
#include <latch>

#include "control/news.h"
#include "message_ranks.h"

namespace torch_ring::test::point_to_point_errors_test {
namespace {

constexpr std::size_t kWhole = MessageStream::kWholeBytes;

TEST(a_message_that_does_not_fit_is_an_error_that_names_both_sides_and_life_goes_on) {
  for (const std::size_t bytes : {std::size_t{20}, kWhole + 20}) {
    for (const bool is_too_long : {true, false}) {
      run_messages({0, 0}, [&](MessageRank& self) {
        const std::size_t room = is_too_long ? bytes - 4 : bytes;
        const DType dtype = is_too_long ? DType::kFloat64 : DType::kFloat32;
        const std::string why = "rank 1 (of 1) receives at most " + std::string(name_of(dtype)) +
                                ", " + std::to_string(room) +
                                " bytes, tag 7; rank 0 (of 0) sends float64, " +
                                std::to_string(bytes) + " bytes, tag 7";
        std::vector<std::byte> values = message(bytes, 1);
        std::vector<std::byte> next = message(10, 2);
        if (self.rank() == 1) {
          std::vector<std::byte> small(room);
          CHECK_THROWS(self.receive(small, 0, 7, dtype)->wait(), ErrorKind::kMismatch, why);
          CHECK_EQ(small, std::vector<std::byte>(room));
          std::vector<std::byte> received(10);
          self.receive(received, 0, 7)->wait();
          CHECK(received == next);
          return;
        }
        const auto send = self.send(values, 1, 7, DType::kFloat64);
        if (bytes > kWhole) {
          CHECK_THROWS(send->wait(), ErrorKind::kMismatch, why);
        } else {
          send->wait();  // it ended before the mismatch was known
          wait_until([&] { return self.log().find(why) != std::string::npos; }, "a warning");
        }
        self.send(next, 1, 7)->wait();
      });
    }
  }
}

TEST(a_shorter_message_than_asked_for_is_received) {
  run_messages({0, 0}, [](MessageRank& self) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{3}, kWhole + 1}) {
      std::vector<std::byte> values = message(bytes, 1);
      if (self.rank() == 0) {
        self.send(values, 1)->wait();
        continue;
      }
      std::vector<std::byte> room(kWhole + 100, std::byte{42});
      const auto receive = self.receive(room, 0);
      receive->wait();
      CHECK_EQ(receive->bytes(), bytes);
      values.resize(room.size(), std::byte{42});
      CHECK(room == values);
    }
  });
}

TEST(a_message_needs_another_rank_of_the_set) {
  run_messages({0, 0}, [](MessageRank& self) {
    std::vector<std::byte> bytes(4);
    for (const int peer : {-1, 2}) {
      CHECK_THROWS(self.send(bytes, peer), ErrorKind::kInvalidArgument, "the set has 2");
      CHECK_THROWS(self.receive(bytes, peer), ErrorKind::kInvalidArgument, "the set has 2");
    }
    CHECK_THROWS(self.send(bytes, self.rank()), ErrorKind::kInvalidArgument, "to itself");
    CHECK_THROWS(self.messages().post({true, std::nullopt, 0, DType::kUInt8, bytes}),
                 ErrorKind::kInvalidArgument, "needs a destination");
  });
}

TEST(a_rank_that_dies_ends_the_messages_of_all_others) {
  std::vector<int> host_of(8, 0);
  host_of[3] = 1;
  Planes planes = make_planes(host_of);
  std::vector<int> members(8);
  std::iota(members.begin(), members.end(), 0);
  std::latch posted(8);
  run_ranks(8, [&](int rank) {
    MessageRank self(rank, members, *at(planes, rank), {});
    if (rank == 0) {
      std::vector<std::byte> bytes = message(8, 1);
      self.send(bytes, 1, 3)->wait();
      posted.arrive_and_wait();
      planes[0]->die();
      return;
    }
    std::vector<std::byte> sent(kWhole + 1), received(kWhole + 1), from_any(8), from_living(8);
    std::vector requests{self.receive(received, 0, 1)};
    requests.push_back(self.send(sent, 0, 2));  // rank 0 posts no receive for it
    const auto any = self.receive(from_any, std::nullopt, 3);
    if (rank == 1) any->wait();
    requests.push_back(self.receive(from_living, rank == 1 ? 2 : 1, 4));
    if (rank != 1) requests.push_back(any);
    posted.arrive_and_wait();
    for (const auto& request : requests) {
      CHECK_THROWS(request->wait(), ErrorKind::kPeerLost, "rank 0 (a thread) died");
    }
    CHECK_THROWS(self.receive(from_any, rank == 1 ? 2 : 1), ErrorKind::kPeerLost,
                 "the messages have ended");
  });
}

TEST(a_rank_that_leaves_ends_the_requests_that_need_it_and_no_others) {
  for (const std::vector<int>& host_of : {std::vector{0, 0, 0}, std::vector{0, 1, 2}}) {
    for (const int leaver : {0, 2}) {
      Planes planes = make_planes(host_of);
      std::latch posted(3);
      std::latch done(2);
      const std::vector<int> members{0, 1, 2};
      run_ranks(3, [&](int rank) {
        MessageRank self(rank, members, *at(planes, rank), {});
        std::vector<std::byte> last = message(8, 1);
        if (rank == leaver) {
          for (const int peer : {0, 1, 2}) {
            if (peer != rank) self.send(last, peer, 9)->wait();
          }
          posted.arrive_and_wait();
          self.messages().close();
          self.plane().stop(kGoodbyePatience, "ValueError: bad data");
          return;
        }
        std::vector<std::byte> bytes(kWhole + 1);
        std::vector<std::byte> into(kWhole + 1);
        const auto send = self.send(bytes, leaver, 1);
        const auto receive = self.receive(into, leaver, 1);
        posted.arrive_and_wait();
        CHECK_THROWS(receive->wait(), ErrorKind::kPeerLost, "left: ValueError: bad data");
        CHECK_THROWS(send->wait(), ErrorKind::kPeerLost, "left: ValueError: bad data");
        // A receive posted now still gets its earlier messages.
        std::vector<std::byte> received(8);
        self.receive(received, leaver, 9)->wait();
        CHECK(received == last);
        CHECK_THROWS(self.receive(into, leaver, 9)->wait(), ErrorKind::kPeerLost, "bad data");
        CHECK_THROWS(self.send(last, leaver)->wait(), ErrorKind::kPeerLost, "bad data");
        // The two others go on.
        const int other = 3 - leaver - rank;
        const auto ours = self.receive(received, std::nullopt, 5);
        self.send(last, other, 5)->wait();
        ours->wait();
        CHECK_EQ(ours->source(), other);
        done.arrive_and_wait();
      });
    }
  }
}

TEST(a_receive_from_any_rank_ends_when_all_others_have_left) {
  Planes planes = make_planes({0, 0, 1});
  run_ranks(3, [&](int rank) {
    MessageRank self(rank, {0, 1, 2}, *at(planes, rank), {});
    std::vector<std::byte> bytes(8);
    if (rank == 1) {
      CHECK_THROWS(self.receive(bytes, std::nullopt)->wait(), ErrorKind::kPeerLost, "has left");
    } else {
      self.plane().stop();
    }
  });
}

TEST(a_request_past_its_deadline_ends_the_messages_of_all_ranks) {
  std::latch posted(2);
  run_messages({0, 0, 1}, [&](MessageRank& self) {
    std::vector<std::byte> bytes(8);
    const bool is_first = self.rank() == 0;
    if (is_first) posted.wait();
    const auto deadline = self.in(std::chrono::milliseconds(is_first ? 300 : 60'000));
    const auto receive = self.receive(bytes, (self.rank() + 1) % 3, 1, DType::kUInt8, deadline);
    if (!is_first) posted.count_down();
    CHECK_THROWS(receive->wait(), ErrorKind::kTimeout,
                 is_first ? "rank 0: receive of uint8, 8 bytes, tag 1 from rank 1"
                          : "rank 0 (of 0) failed: rank 0: receive of uint8, 8 bytes, tag 1");
  });
}

TEST(a_set_that_another_rank_has_given_up_ends_its_messages) {
  std::latch posted(2);
  run_messages({0, 0}, [&](MessageRank& self) {
    std::vector<std::byte> bytes(8);
    const auto receive = self.receive(bytes, 1 - self.rank());
    posted.arrive_and_wait();
    if (self.rank() == 0) {
      self.plane().fail(MessageRank::kSet, Error(ErrorKind::kInternal, "no memory"));
    }
    CHECK_THROWS(receive->wait(), ErrorKind::kPeerLost, "rank 0 (of 0) failed: no memory");
  });
}

TEST(a_message_that_stands_still_on_its_way_is_an_error) {
  // A stand-in for rank 0 accepts a long message, but reads none of it, and stays alive.
  const Planes planes = make_planes({0, 1});
  MessageRank::Options options;
  options.transfer_timeout = std::chrono::milliseconds(300);
  MessageRank self(1, {0, 1}, *planes[1], options);
  std::vector<std::byte> bytes(64u << 20);  // more than the sockets' buffers hold
  const auto send = self.send(bytes, 0);
  const auto sockets = planes[0]->sockets(MessageRank::kSet | kMessagesDown, {0, 1}, 1);
  std::vector<Socket> ends;
  wait_until([&] { return !(ends = sockets->take(1, false)).empty(); }, "a connection");
  MessageFrame frame;
  wait_until(
      [&] {
        return ::recv(ends[0].get(), &frame, sizeof frame, MSG_DONTWAIT) == ssize_t{sizeof frame};
      },
      "an offer");
  CHECK(frame.kind == MessageFrame::Kind::kOffer);
  frame.kind = MessageFrame::Kind::kAccept;
  CHECK_EQ(::send(ends[0].get(), &frame, sizeof frame, MSG_NOSIGNAL), ssize_t{sizeof frame});
  CHECK_THROWS(send->wait(), ErrorKind::kTimeout, "rank 0 (of 0) has not moved for 0.3 s");
}

TEST(what_is_no_message_ends_the_messages) {
  const Planes planes = make_planes({0, 1});
  MessageRank self(1, {0, 1}, *planes[1], {});
  std::vector<std::byte> bytes(8);
  const auto receive = self.receive(bytes, 0);
  const auto sockets = planes[0]->sockets(MessageRank::kSet | kMessagesUp, {0, 1}, 1);
  std::vector<Socket> ends;
  wait_until([&] { return !(ends = sockets->take(1, true)).empty(); }, "a connection");
  MessageFrame frame;
  frame.bytes = kWhole + 1;
  CHECK_EQ(::send(ends[0].get(), &frame, sizeof frame, MSG_NOSIGNAL), ssize_t{sizeof frame});
  CHECK_THROWS(receive->wait(), ErrorKind::kInternal,
               "rank 0 (of 0) has sent bytes that are no message");
}

TEST(a_request_that_waits_for_long_is_in_the_log) {
  MessageRank::Options options;
  options.stall_warning = std::chrono::milliseconds(50);
  run_messages(
      {0, 0},
      [](MessageRank& self) {
        std::vector<std::byte> bytes(8);
        std::vector<std::byte> go(1);
        if (self.rank() == 1) {
          self.receive(go, 0, 2)->wait();
          self.send(bytes, 0, 1)->wait();
          return;
        }
        const auto receive = self.receive(bytes, 1, 1);
        wait_until(
            [&] {
              return self.log().find(
                         "receive of uint8, 8 bytes, tag 1 from rank 1 (of 1) has "
                         "waited for 0.") != std::string::npos;
            },
            "a warning");
        self.send(go, 1, 2)->wait();
        receive->wait();
      },
      options);
}

}  // namespace
}  // namespace torch_ring::test::point_to_point_errors_test
